"""What this machine and this data can honour of a plan, and why not the rest."""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from speedkit.errors import PlanError
from speedkit.machine import Hardware, this_machine
from speedkit.plan import CUDA_GRAPHS, TUNED, Plan

if TYPE_CHECKING:
    from speedkit.workload import Workload

# Field, value, the capability of `Hardware.supports` that it takes, and what it falls back to without, perhaps further.
NEEDS = (
    ("precision", "fp8", "fp8", "bf16"),
    ("precision", "bf16", "bf16", "fp16"),
    ("precision", "fp16", "fp16", "default"),
    ("precision", "tf32", "tf32", "default"),
    *(("compile", mode, "compile", "off") for mode in ("default", *TUNED)),
    ("compile", "reduce-overhead", "cuda_graphs", "default"),
    *(("attention", kernel, f"{kernel}_attention", "auto") for kernel in ("flash", "efficient", "cudnn", "varlen")),
    ("allocator", "expandable", "expandable_segments", "default"),
    ("allocator", "keep", "mallopt", "default"),
    *((field, True, field, False) for field in ("pin_memory", "prefetch", "cudnn_benchmark")),
    ("decoder", "torchcodec", "torchcodec", "soundfile"),
)
SHORT = ("bf16", "fp16", "fp8")  # with which attention computes in 16 bits
FEW = 2  # fallbacks that are told one by one
Rule = tuple[str, Any, str]  # a field that cannot be as it is, what it is instead, and why


@dataclasses.dataclass(frozen=True)
class Fallback:
    """One field of a plan that this machine could not honour."""

    field: str
    asked: Any
    got: Any
    why: str

    def __str__(self) -> str:
        return f"{self.field}: asked {self.asked}, got {self.got}: {self.why}"


@dataclasses.dataclass(frozen=True)
class EffectivePlan:
    """What a plan becomes on a machine."""

    asked: Plan
    plan: Plan
    fallbacks: tuple[Fallback, ...] = ()

    def with_fallbacks(self, *new: Fallback) -> "EffectivePlan":
        """Return it with `new` fallbacks, as they come out when model and data are there."""
        plan = dataclasses.replace(self.plan, **{fallback.field: fallback.got for fallback in new})
        return EffectivePlan(self.asked, plan, (*self.fallbacks, *new))

    def notes(self, verbose: bool = False) -> list[str]:
        """Return a sentence for each fallback, or, if not `verbose`, one for those that only lose what was asked."""
        lost = [fallback for fallback in self.fallbacks if fallback.asked not in ("auto", fallback.got)]
        if verbose or len(lost) <= FEW:
            return list(map(str, self.fallbacks))
        names = ", ".join(fallback.field for fallback in lost)
        rest = [str(fallback) for fallback in self.fallbacks if fallback not in lost]
        return [*rest, f"{len(lost)} fields of the plan do not apply here ({names}): --verbose (verbose=True) says why"]

    def fall_back(self, field: str, got: Any, why: str) -> "EffectivePlan":
        """Return it with `field` as `got`. A field that falls back further is one fallback, with each reason."""
        fallbacks = {fallback.field: fallback for fallback in self.fallbacks}
        if field in fallbacks:
            why = f"{fallbacks[field].why}; {why}"
        fallbacks[field] = Fallback(field, getattr(self.asked, field), got, why)
        return EffectivePlan(self.asked, dataclasses.replace(self.plan, **{field: got}), tuple(fallbacks.values()))


def resolve(
    plan: Plan,
    hardware: Hardware | None = None,
    strict: bool = False,
    *,
    workload: "Workload | None" = None,
    batch_size: int | None = None,
) -> EffectivePlan:
    """Return the plan that `hardware` (and the data of `workload`) can honour, and why not for each field it cannot.

    `batch_size` is the recipe's, where it is known. Raises PlanError for ranks that it cannot run, and under `strict`
    for any fallback.
    """
    hardware = hardware or this_machine()
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or plan.ranks)  # torchrun's: of several machines, those of this one
    if plan.ranks > 1 and hardware.device.type != "cpu" and here > hardware.gpu_count:
        raise PlanError(f"ranks={plan.ranks} takes {here} GPUs here, and there are {hardware.gpu_count}: lower ranks")
    own = None if workload is None else workload.own_loader
    effective = EffectivePlan(plan, plan if own is None else dataclasses.replace(plan, **own.own_settings(plan)))
    # One at a time, and then all are asked again: what one field falls back to may be in the way of another.
    while broken := broken_rules(effective.plan, hardware, workload, batch_size=batch_size):
        effective = effective.fall_back(*broken[0])
    if workload is not None and workload.augment_waveform is not None:
        plan = effective.plan
        if (plan.features_on == "cpu") if plan.cache == "off" else (plan.cache_of == "features"):
            why = "augment_waveform is skipped: it is for waveforms on the device (features_on or cache_of)"
            effective = effective.fall_back("features_on", plan.features_on, why)
    if strict and effective.fallbacks:
        raise PlanError(f"the plan cannot be honoured here, and --strict allows no fallback: {effective.fallbacks[0]}")
    return effective


def broken_rules(plan: Plan, hardware: Hardware, workload: "Workload | None", *, batch_size: int | None) -> list[Rule]:
    """Return the rules that `plan` breaks on `hardware` with the data of `workload`."""
    cuda = hardware.device.type == "cuda"
    items_in_memory = workload is not None and not workload.cacheable
    lengths_differ = None if workload is None else workload.length is not None
    cached, graphs = plan.cache != "off", plan.compile in CUDA_GRAPHS
    many_shapes = lengths_differ and not plan.bucket
    accumulates = plan.micro_batch == "auto" or (batch_size and plan.micro_batch and plan.micro_batch < batch_size)
    ddp, fsdp = (plan.ranks > 1 and plan.strategy == strategy for strategy in ("ddp", "fsdp"))
    half = "bf16" if hardware.supports("bf16") else "default"
    slices = "the items are slices of memory, or decimal inputs with whole-number targets"
    resident = items_in_memory and workload.rows is not None and plan.cache == "device"  # type: ignore[union-attr]
    anew = "each length would be tuned or recorded anew"
    padding = "lengths differ: features of padded waveforms would depend on the padding"
    rules = [  # field, what it is instead, when, and why
        *(
            (field, instead, getattr(plan, field) == value, hardware.why_not(capability))
            for field, value, capability, instead in NEEDS
            if not hardware.supports(capability)
        ),
        ("pin_memory", True, cuda and plan.prefetch, "prefetch copies without waiting, which takes page-locked memory"),
        ("fused_optimizer", True, plan.precision == "fp16", "only it skips bad steps of float16 without a host sync"),
        # The data.
        *([] if workload is None or workload.own_loader is None else workload.own_loader.cases()),
        ("cache", "off", items_in_memory and not resident, slices),
        ("features_on", "cpu", items_in_memory, slices),
        ("bucket", False, lengths_differ is False, "all items have one length: nothing is padded"),
        ("compile", "default", many_shapes and plan.compile in TUNED, f"{anew}: bucket makes them few"),
        ("cudnn_benchmark", False, many_shapes, f"{anew}: bucket makes them few"),
        ("features_on", "cpu", lengths_differ, padding),
        ("cache_of", "features", lengths_differ and cached, padding),
        # The cache.
        ("cache", "ram", plan.cache == "device" and hardware.device.type == "cpu", "the CPU's memory is the RAM"),
        ("workers", 0, cached, "a cached batch is one gather from memory; worker processes would copy it once more"),
        ("features_on", "cpu", cached and plan.cache_of == "features", "the cache holds features: none are computed"),
        ("attention", "auto", plan.attention == "varlen" and plan.precision not in SHORT, "varlen takes 16 bits"),
        # Several ranks.
        ("compile", "off", fsdp, "compiled code does not gather the weights that fsdp has sharded; ddp compiles"),
        ("channels_last", False, fsdp, "fsdp shards only weights that lie in the usual order"),
        ("precision", half, fsdp and plan.precision.startswith(("fp8", "fp16")), "fsdp ranks do not agree on scales"),
        ("compile", "default", ddp and graphs, "CUDA graphs keep gradients where ddp does not look for them"),
        # https://github.com/pytorch/pytorch/issues/169545
        ("compile", "default", accumulates and graphs and cuda, "a CUDA graph's replay writes over summed gradients"),
    ]
    return [(field, instead, why) for field, instead, when, why in rules if when and getattr(plan, field) != instead]
