"""What a change of the plan should gain: a step's operators, counted once, against the peaks measured here.

A roofline by operator (Williams et al. 2009): each takes as long as its products at the peak of their number format, or
as its bytes at the bandwidth of memory, whichever is longer. Of other parts of a step the table below knows the bounds.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, shape_wrapper

from speedkit.measure.optimizations import Change
from speedkit.measure.process import process_kept
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

STEPS = 3  # that are counted where lengths differ from batch to batch
SIZES = {"bf16": 2, "fp16": 2, "fp8": 1}  # bytes of a number, where it is not 4
FUSED = 3  # operators that compiled code makes one kernel of, about
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


# ---- what a step computes and moves ----


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
            run.position.batch = next(run.data.batches)  # loading is not counted
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


# ---- what computes, by the roofline ----

Gain = tuple[float, float]  # how many times as fast something becomes, at worst and at best


class Seconds(NamedTuple):
    """Seconds of a step by the roofline: of products (of matrices, convolutions, attention), and of all other work."""

    products: float
    attention: float  # of `products`
    layout: float  # in which convolutions' inputs and outputs are brought into another layout, and back
    rest: float


def roofline_seconds(
    operators: Operators, limits: Mapping[str, float], number_format: str, *, size: float = 1.0
) -> Seconds:
    """Return the seconds of a step with products in `number_format` and `size` times the bytes that were counted."""
    rate = limits.get(f"matmul_{number_format}", limits["matmul_fp32"])
    products = attention = layout = rest = 0.0
    for name, moved_bytes in operators.moved_bytes.items():
        moves_s = size * moved_bytes / limits["memory_bandwidth"]
        if name not in operators.flops:
            rest += moves_s
            continue
        seconds = max(operators.flops[name] / rate, moves_s)
        products += seconds
        if "attention" in name:
            attention += seconds
        if "conv" in name:
            layout += 2 * moves_s
    return Seconds(products, attention, layout, rest)


def computing_gains(operators: Operators, limits: Mapping[str, float], number_format: str) -> dict[str, Gain]:
    """Return what fields of a plan, and number formats, make of what computes in `number_format` now."""
    now = roofline_seconds(operators, limits, number_format)
    total = now.products + now.rest
    gains = {
        "channels_last": (0.95, total / max(total - now.layout, now.products)),
        # A kernel for each chain of operators moves what goes into it and comes out, and nothing in between.
        "compile": (0.9, total / (now.products + now.rest / FUSED)),
        "attention": (0.95, total / (total - now.attention / 2)),
    }
    for wanted, bytes_each in SIZES.items():
        smaller = roofline_seconds(operators, limits, wanted, size=bytes_each / SIZES.get(number_format, 4))
        # At worst casts eat up what faster products gain; on some CPUs products of 16 bits are slower.
        shortest_s, longest_s = sorted((now.products, smaller.products))
        gains[wanted] = (total / (longest_s + smaller.rest), total / (shortest_s + smaller.rest))
    return gains


# ---- what a change makes of a whole step ----

# Causes of measure.breakdown.
LOADING = ("data wait",)
COPYING = ("host-to-device copy",)
UPDATING = ("optimizer",)
COMPUTING = ("forward", "backward", "compute-bound", "bandwidth-bound")  # on a CPU, and on a GPU
COMPILED = (*COMPUTING, "launch-bound")

# Field: the parts of a step that it acts on, and how many times as fast they become, at worst and at best. Of workers,
# bucket and compile_scope `predict` knows that better, and of what computes the roofline where a step was counted.
EFFECTS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "workers": (LOADING, 0.7, 1.0),
    "cache": (LOADING, 3.0, math.inf),  # what is left is one gather from memory
    "features_on": (LOADING, 0.8, 3.0),
    "decoder": (LOADING, 0.7, 1.5),
    "prefetch": (COPYING, 1.0, math.inf),
    "bucket": (COMPUTING, 1.0, 1.0),
    "fused_optimizer": (UPDATING, 1.0, 4.0),
    "log_every": (("sync-bound", "other host work"), 1.0, math.inf),
    "precision": (COMPUTING, 1.0, 2.0),
    "channels_last": (COMPUTING, 0.95, 1.4),
    "threads": (COMPUTING, 0.5, 1.5),
    "compile": (COMPILED, 0.9, 1.3),
    "compile_scope": (COMPILED, 1.0, 1.0),
    "attention": (COMPUTING, 0.95, 1.1),
}


def acts_on(change: Change) -> set[str]:
    """Return the parts of a step that a change acts on."""
    parts: set[str] = set()
    for field, value in change.items():
        if value and field in EFFECTS:
            parts.update(EFFECTS[field][0])
    return parts


def predict(
    change: Change,
    shares: Mapping[str, float],
    *,
    frames: float = 1.0,
    gains: Mapping[str, Gain] | None = None,
) -> Gain:
    """Return the least and the greatest gain to expect of a change: Amdahl's law (1967) over the parts it acts on.

    `shares` are those of the causes in the breakdown of the best plan. `frames` is how many times fewer padded frames
    buckets leave, `gains` those of `computing_gains`.
    """
    effects = EFFECTS | {
        "workers": (LOADING, 0.7, change.get("workers", 1)),
        "bucket": (COMPUTING, frames, frames),
        # Decoding takes a CPU's own caches, too, from what computes.
        "cache_dtype": (COMPUTING, 1.0, 1.1),
        # Blocks that are compiled already leave to the model what lies between them.
        "compile_scope": (COMPILED, 1.0, 1.1 if change.get("compile_scope") == "model" else 1.0),
    }
    worst = best = 1.0
    for field, value in change.items():
        if value and field in effects:
            parts, low, high = effects[field]
            key = value if field == "precision" else field
            low, high = (gains or {}).get(key, (low, high))
            share = sum(shares.get(part, 0.0) for part in parts)
            worst -= share * (1 - 1 / low)
            best -= share * (1 - 1 / high)
    return 1 / worst, 1 / max(best, 0.01)
