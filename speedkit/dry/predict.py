"""From what a step asks of a GPU to how long it takes there: predicted, never measured.

The roofline by operator that tunings use, on the data sheet's rates. The shares of these that real steps reach are the
only constants; `benchmarks/published.py` holds the predictions against what others have measured.
"""

from collections.abc import Mapping
from typing import Any

from speedkit.dry.gpus import KINDS, Gpu
from speedkit.dry.step import UPDATES
from speedkit.measure.predict import computing_gains, roofline_seconds
from speedkit.measure.roofline import Operators

# What real steps reach of the data sheet's rate of products, and of its bandwidth.
PRODUCTS = 0.9
BANDWIDTH = 0.55
LAUNCH_S = 6e-6  # that the host takes for a launch, about: nothing was held against it
# Mean factors from what was published, of cases that chose no constant.
ERRORS = {"eager": 1.36, "compiled": 1.27, "memory": 1.16, "gain": 1.23}
CLOSE = 1.2  # a gain below it is too close to call


def limits_of(gpu: Gpu) -> dict[str, float]:
    """Return what products and copies reach on a GPU, named as the peaks that are measured."""
    limits = {f"matmul_{kind}": PRODUCTS * 1e12 * rate for kind, rate in gpu.tflops}
    limits["memory_bandwidth"] = BANDWIDTH * gpu.bandwidth
    return limits


def seconds_by_kind(counted: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """Return the seconds of a step on a GPU by kind of kernel, as if the host never kept it waiting."""
    moved = counted["moved_bytes"]
    if "fused_bytes" in counted:
        moved = counted["outside_bytes"] | {"compiled": counted["fused_bytes"]}
    updates = {name: number for name, number in moved.items() if name.startswith(UPDATES)}
    limits = limits_of(gpu)
    total = roofline_seconds(Operators(counted["flops"], moved), limits, counted["number_format"])
    update = roofline_seconds(Operators({}, updates), limits, counted["number_format"]).rest
    return {
        "products": total.products - total.attention,
        "attention": total.attention,
        "other kernels": total.rest - update,
        "optimizer": update,
    }


def prediction(counted: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """Return the seconds of a step on a GPU: by kind, and as a range; none where launches take the host longer."""
    kinds = seconds_by_kind(counted, gpu)
    seconds = sum(kinds.values())
    error = ERRORS["compiled" if "fused_bytes" in counted else "eager"]
    found = {"seconds_by_kind": kinds, "typical_error": error, "launch_bound": False}
    if counted["launches"] * LAUNCH_S > seconds:
        return found | {"launch_bound": True, "seconds": None, "range_s": None}
    return found | {"seconds": seconds, "range_s": (seconds / error, seconds * error)}


def gains(counted: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """Return what each change of the plan should gain at best, of an eager step on a GPU."""
    limits = limits_of(gpu)
    operators = Operators(counted["flops"], counted["moved_bytes"])
    found = computing_gains(operators, limits, counted["number_format"])
    return {name: best for name, (_, best) in found.items() if name not in KINDS or f"matmul_{name}" in limits}
