"""The optimizations of the tuning, a table: what each changes, what it promises, and what it should gain."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from speedkit.config import nearest
from speedkit.errors import UsageError
from speedkit.machine import Hardware
from speedkit.plan import Plan

Change = dict[str, Any]  # plan fields and their new values; the first is what it is about, the others go with it


@dataclasses.dataclass(frozen=True)
class Optimization:
    """One optimization: each of its `changes` of the best plan so far is a candidate.

    `promises` says what it leaves of the losses: bit-equal, loss-equal (they move less than by another seed), or
    order-equal (other batches of the same items: their mean moves less).
    """

    name: str
    changes: Callable[[Plan, Hardware], list[Change]]
    promises: str


# ---- what each optimization changes; what a machine or the data rule out, `plan.resolve` says ----


def always(**change: Any) -> Callable[[Plan, Hardware], list[Change]]:
    """Return the changes of an optimization that has one, whatever the plan and the machine."""

    def changes(_: Plan, __: Hardware) -> list[Change]:
        return [change]

    return changes


def workers(_: Plan, hardware: Hardware) -> list[Change]:
    """Loader processes, as many as there are cores for."""
    change = {"workers": min(hardware.cores, 16), "persistent_workers": True}
    if hardware.supports("pin_memory"):
        change["pin_memory"] = True
    return [change]


def cache(plan: Plan, hardware: Hardware) -> list[Change]:
    """Cached features: on a GPU beside the model where they fit; on a CPU's disk, which its page cache makes RAM."""
    if plan.cache != "off":
        return []
    places = ["device", "ram"]
    if hardware.device.type == "cpu":
        places = ["disk"]
    also = {"cache_dtype": "float16", "workers": 0, "persistent_workers": False}
    return [{"cache": place, **also} for place in places]


def threads(_: Plan, hardware: Hardware) -> list[Change]:
    """Fewer threads within an operation: on a CPU whose cores others use too, all threads wait for the last."""
    if hardware.device.type != "cpu":
        return []
    return [{"threads": count} for count in sorted({1, hardware.threads // 2}) if 0 < count < hardware.threads]


def features_on(_: Plan, hardware: Hardware) -> list[Change]:
    """Features computed on the GPU."""
    if hardware.device.type == "cpu":
        return []
    return [{"features_on": "device"}]


def precision(plan: Plan, hardware: Hardware) -> list[Change]:
    """Fewer bits: bf16, else fp16, which needs loss scaling and is rarely faster.

    Where a GPU waits for launches nothing of it shows, so that it is a candidate together with CUDA graphs too.
    """
    if plan.precision != "default":
        return []
    change: Change = {"precision": "bf16"}
    if hardware.supports("fp16") and not hardware.supports("bf16"):
        change = {"precision": "fp16"}
    if plan.compile == "reduce-overhead" or not hardware.supports("cuda_graphs"):
        return [change]
    return [change, {**change, "compile": "reduce-overhead"}]


def channels_last(plan: Plan, hardware: Hardware) -> list[Change]:
    """The memory format of images; on a GPU eager layers may undo it, so that it is a candidate with compile too."""
    if plan.compile != "off" or plan.channels_last or hardware.device.type == "cpu":
        return [{"channels_last": True}]
    return [{"channels_last": True}, {"channels_last": True, "compile": "default"}]


def fp8(plan: Plan, _: Hardware) -> list[Change]:
    """8-bit matrix products, which pay only in compiled code that computes in bf16 already."""
    if plan.precision == "bf16" and plan.compile != "off":
        return [{"precision": "fp8"}]
    return []


def compiled(plan: Plan, hardware: Hardware) -> list[Change]:
    """Compiled blocks, whose code is soon made, or model; then, on a GPU, without the launches of its kernels."""
    if plan.compile == "off":
        return [{"compile": "default", "compile_scope": "blocks"}, {"compile": "default"}]
    changes: list[Change] = []
    if plan.compile_scope == "blocks":
        changes.append({"compile_scope": "model"})
    if hardware.supports("cuda_graphs"):
        changes.append({"compile": "reduce-overhead"})
    return changes


def attention(_: Plan, hardware: Hardware) -> list[Change]:
    """Attention kernels; which of them PyTorch chooses by itself is asked before one is tried."""
    if hardware.device.type == "cuda":
        return [{"attention": "cudnn"}, {"attention": "flash"}, {"attention": "varlen"}]
    return [{"attention": "cudnn"}]


# Each field that makes training faster on some machine. Not here: what saves memory for time (checkpointing), what
# leaves out something that was asked for (validate_every), and micro_batch: smaller parts of a batch took a CPU as long
# as the whole, or longer. Nor what a tuning cannot try: max-autotune compiles for minutes, and of cudnn_benchmark and
# allocator turns in one process show nothing, for what came first stays.
OPTIMIZATIONS: tuple[Optimization, ...] = (
    Optimization("workers", workers, "bit-equal"),
    Optimization("cache", cache, "loss-equal"),
    Optimization("decoder", always(decoder="torchcodec"), "loss-equal"),
    Optimization("features_on", features_on, "loss-equal"),
    Optimization("prefetch", always(prefetch=True, pin_memory=True), "bit-equal"),
    Optimization("bucket", always(bucket=True), "order-equal"),
    Optimization("host_syncs", always(fused_optimizer=True, log_every=50), "loss-equal"),
    Optimization("precision", precision, "loss-equal"),
    Optimization("channels_last", channels_last, "loss-equal"),
    Optimization("threads", threads, "loss-equal"),
    Optimization("compile", compiled, "loss-equal"),
    Optimization("attention", attention, "loss-equal"),
    Optimization("fp8", fp8, "loss-equal"),
)


def named(names: Sequence[str] | None) -> list[Optimization]:
    """Return the optimizations of these names, by default all. Raises UsageError for an unknown name."""
    optimizations = {optimization.name: optimization for optimization in OPTIMIZATIONS}
    for name in names or ():
        if name not in optimizations:
            raise UsageError(
                f"there is no optimization {name!r}{nearest(name, optimizations)}: take {', '.join(optimizations)}"
            )
    return [optimizations[name] for name in optimizations if names is None or name in names]


# ---- what each should gain ----

# Causes of measure.breakdown.
LOADING = ("data wait",)
COPYING = ("host-to-device copy",)
UPDATING = ("optimizer",)
COMPUTING = ("forward", "backward", "compute-bound", "bandwidth-bound")  # on a CPU, and on a GPU
COMPILED = (*COMPUTING, "launch-bound")

# Field: the parts of a step that it acts on, and how many times as fast they become, at worst and at best. Of workers,
# bucket, precision and compile_scope, `predict` knows that better.
EFFECTS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "workers": (LOADING, 0.7, 1.0),
    "cache": (LOADING, 3.0, math.inf),  # what is left is one gather from memory
    "features_on": (LOADING, 0.8, 3.0),
    "decoder": (LOADING, 0.7, 1.5),
    "prefetch": (COPYING, 1.0, math.inf),
    "bucket": (COMPUTING, 1.0, 1.0),
    "fused_optimizer": (UPDATING, 1.0, 4.0),
    "log_every": (("sync-bound", "other host work"), 1.0, math.inf),
    "precision": (COMPUTING, 1.0, 1.0),
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
    matmul: float = 1.0,
) -> tuple[float, float]:
    """Return the least and the greatest gain to expect of a change: Amdahl's law (1967) over the parts it acts on.

    `shares` are those of the causes in the breakdown of the best plan. `frames` is how many times fewer padded frames
    buckets leave, `matmul` how many times as fast matrix products are in the change's number format.
    """
    effects = EFFECTS | {
        "workers": (LOADING, 0.7, change.get("workers", 1)),
        "bucket": (COMPUTING, frames, frames),
        # Not all of a step is matrix products, and few run at the peak.
        "precision": (COMPUTING, max(1.0, matmul) ** 0.15, max(1.0, matmul)),
        # Decoding takes a CPU's own caches, too, from what computes.
        "cache_dtype": (COMPUTING, 1.0, 1.1),
        # Blocks that are compiled already leave to the model what lies between them.
        "compile_scope": (COMPILED, 1.0, 1.1 if change.get("compile_scope") == "model" else 1.0),
    }
    worst = best = 1.0
    for field, value in change.items():
        if value and field in effects:
            parts, low, high = effects[field]
            share = sum(shares.get(part, 0.0) for part in parts)
            worst -= share * (1 - 1 / low)
            best -= share * (1 - 1 / high)
    return 1 / worst, 1 / max(best, 0.01)


# ---- plans and changes ----


def plan_of(changes: Iterable[Change]) -> Plan:
    """Return plain PyTorch with `changes`, one after the other."""
    plan = Plan()
    for change in changes:
        plan = dataclasses.replace(plan, **change)
    return plan


def changed(plan: Plan, before: Plan | None = None) -> Change:
    """Return the fields in which `plan` differs from another, by default plain PyTorch."""
    before = before or Plan()
    return {field: value for field, value in vars(plan).items() if value != getattr(before, field)}


def text(change: Change) -> str:
    """Return a change as `field=value, field=value`."""
    return ", ".join(f"{field}={value}" for field, value in change.items()) or "nothing"
