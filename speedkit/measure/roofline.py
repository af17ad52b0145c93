"""What a step computes and moves, against what this machine was measured to reach."""

from typing import Any

from speedkit.fallbacks import resolve
from speedkit.machine import Hardware
from speedkit.measure.breakdown import Breakdown
from speedkit.measure.peaks import peaks
from speedkit.measure.predict import count, format_of_products
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload


def roofline(
    workload: Workload, recipe: Recipe, plan: Plan, *, hardware: Hardware, breakdown: Breakdown
) -> dict[str, Any]:
    """Return how near a step of `workload`, as its `breakdown` has it, comes to the peaks measured on this machine.

    Bytes are an upper estimate: all inputs and outputs of an eager step's operators, whether or not a cache holds them.
    """
    operators = count(workload, recipe, plan, device=hardware.device)
    flops = sum(operators.flops.values())
    moved = sum(operators.moved_bytes.values())
    limits = peaks(hardware)
    precision = resolve(plan, hardware, workload=workload).plan.precision
    dtype = format_of_products(precision, operators, hardware.device)
    if f"matmul_{dtype}" not in limits:
        dtype = "fp32"
    flops_per_s = flops / breakdown.step_s
    bytes_per_s = moved / breakdown.step_s
    peak = limits[f"matmul_{dtype}"].value
    bandwidth = limits["memory_bandwidth"].value
    mfu = flops_per_s / peak
    return {
        "flops_per_step": flops,
        "dtype": dtype,
        "achieved_flops_per_s": flops_per_s,
        "peak_flops_per_s": peak,
        "mfu": mfu,
        "bytes_per_step": moved,
        "peak_bandwidth": bandwidth,
        "tells": [
            f"{flops_per_s / 1e9:.4g} GFLOP/s: {mfu:.1%} of what products of {dtype} matrices reach here (MFU)",
            f"at most {bytes_per_s / 1e9:.4g} GB/s of {bandwidth / 1e9:.4g} measured",
        ],
    }
