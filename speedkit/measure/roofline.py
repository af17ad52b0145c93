"""What a step computes and moves, operator by operator, against what this machine was measured to reach."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, shape_wrapper

from speedkit.fallbacks import resolve
from speedkit.machine import Hardware
from speedkit.measure.breakdown import Breakdown
from speedkit.measure.peaks import peaks
from speedkit.measure.process import process_kept
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

STEPS = 3  # that are counted where lengths differ from batch to batch
aten = torch.ops.aten
# PyTorch's counter leaves out the CPU's attention kernel, whose FLOPs are those of any other.
for ending in ("", "_backward"):
    flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{ending}")] = flop_registry[
        getattr(aten, f"_scaled_dot_product_flash_attention{ending}")
    ]


@shape_wrapper
def convolution_backward_flops(output_gradient: Any, inputs: Any, weight: Any, *options: Any, **_named: Any) -> int:
    """Return the FLOPs of a convolution's backward pass: those of the forward pass for each of its two products."""
    *_, transposed, _output_padding, _groups, (for_inputs, for_weight, _for_bias) = options
    return (for_inputs + for_weight) * conv_flop_count(inputs, weight, output_gradient, transposed=transposed)


flop_registry[aten.convolution_backward] = convolution_backward_flops  # PyTorch's leaves groups out


class Operators(NamedTuple):
    """What a step's operators compute and move, each by the operator's name.

    Bytes are an upper estimate: all inputs and outputs, whether or not a cache holds them.
    """

    flops: Mapping[str, int]
    moved_bytes: Mapping[str, int]


class OperatorCounter(TorchDispatchMode):
    """Adds up the FLOPs and the bytes of all operators inside; a view moves none."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = Counter[str]()
        self.formats = Counter[torch.dtype]()  # number format -> FLOPs of the products whose first input has it
        self.moved_bytes = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        packet = operation.overloadpacket
        name = packet.__name__
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self.flops[name] += flops
            self.formats[next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))] += flops
        if not operation.is_view and "empty" not in name and name != "_unsafe_view":
            leaves = tree_leaves((args, kwargs, result))
            self.moved_bytes[name] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return result


def count(workload: Workload, recipe: Recipe, plan: Plan, *, device: torch.device) -> Operators:
    """Return what a step's operators compute and move.

    Counted on a fresh, eager model: compiled code that meets a dispatch mode stays off for good.
    """
    # Without what changes nothing in what the model computes; recomputing to save memory is no work of the model.
    plan = dataclasses.replace(plan, compile="off", checkpointing="off", workers=0, cache="off")
    count_steps = 1
    if workload.length is not None:
        count_steps = STEPS
    counter = OperatorCounter()
    with (
        process_kept(device),
        contextlib.closing(setup_run(workload, recipe, plan, device=device, endless=True)) as run,
    ):
        training = steps(run)
        for _ in range(count_steps):
            run.position.batch = next(run.data.training_batches)  # loading is not counted
            with counter:
                next(training)
    flops = {name: number // count_steps for name, number in counter.flops.items()}
    return Operators(flops, {name: number // count_steps for name, number in counter.moved_bytes.items()})


def format_of_products(precision: str, operators: Operators, device: torch.device) -> str:
    """Return the number format of a step's products under a plan's `precision`, as peaks are named."""
    flops = operators.flops
    convolutions = sum(number for name, number in flops.items() if "conv" in name)
    if precision == "default" and device.type == "cuda" and 2 * convolutions > sum(flops.values()):
        return "tf32"  # as cuDNN multiplies unless it is told otherwise
    return "fp32" if precision == "default" else precision.removesuffix("-emulated")


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
