"""What a change of the plan should gain: a step's operators, counted once, against the peaks measured here.

A roofline by operator (Williams et al. 2009): each takes as long as its products at the peak of their number format, or
as its bytes at the bandwidth of memory, whichever is longer. Of other parts of a step the table below knows the bounds.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from speedkit.measure.optimizations import Change
from speedkit.measure.roofline import Operators

SIZES = {"bf16": 2, "fp16": 2, "fp8": 1}  # bytes of a number, where it is not 4
FUSED = 3  # operators that compiled code makes one kernel of, about
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
COMPUTING = ("forward", "backward", "compute-bound", "bandwidth-bound")  # on a CPU, and on a GPU
COMPILED = (*COMPUTING, "launch-bound")

# Field: the parts of a step that it acts on, and how many times as fast they become, at worst and at best. Of workers,
# bucket and compile_scope `predict` knows that better, and of what computes the roofline where a step was counted.
EFFECTS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "workers": (LOADING, 0.7, 1.0),
    "cache": (LOADING, 3.0, math.inf),  # what is left is one gather from memory
    "features_on": (LOADING, 0.8, 3.0),
    "decoder": (LOADING, 0.7, 1.5),
    "prefetch": (("host-to-device copy",), 1.0, math.inf),
    "bucket": (COMPUTING, 1.0, 1.0),
    "fused_optimizer": (("optimizer",), 1.0, 4.0),
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
    gains: Mapping[str, Gain],
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
            low, high = gains.get(key, (low, high))
            share = sum(shares.get(part, 0.0) for part in parts)
            worst -= share * (1 - 1 / low)
            best -= share * (1 - 1 / high)
    return 1 / worst, 1 / max(best, 0.01)
