"""The optimizations of the tuning, a table: what each changes and what it promises."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from speedkit.config import nearest
from speedkit.errors import UsageError
from speedkit.machine import Hardware
from speedkit.plan import Plan

Change = dict[str, Any]  # plan fields and their new values; the first is what it is about, the others go with it


class Optimization(NamedTuple):
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
