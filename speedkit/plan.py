"""Plan: how fast a recipe is learned, one field per optimization. Changing it must not change what is learned."""

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit.config import settings
from speedkit.errors import PlanError
from speedkit.hardware import Hardware, this_machine

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

# Field, value, the capability of `Hardware.supports` that it takes, and what it falls back to without, perhaps further.
NEEDS = (
    ("precision", "fp8", "fp8", "bf16"),
    ("precision", "bf16", "bf16", "fp16"),
    ("precision", "fp16", "fp16", "default"),
    ("precision", "tf32", "tf32", "default"),
    *(("compile", mode, "compile", "off") for mode in ("default", "reduce-overhead", "max-autotune")),
    ("compile", "reduce-overhead", "cuda_graphs", "default"),
    ("attention", "flash", "flash_attention", "auto"),
    ("pin_memory", True, "pin_memory", False),
    *(("decoder", decoder, decoder, "soundfile") for decoder in ("torchcodec", "librosa")),
)
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that record them
Rule = tuple[str, Any, str]  # a field that cannot be as it is, what it is instead, and why
Count = Annotated[int, Field(ge=1)]


@settings
class Plan:
    """How fast a recipe is learned. `Plan()` is PyTorch as it comes, no switch touched: the naive baseline."""

    micro_batch: Count | Literal["auto"] | None = None
    """Samples per forward pass; gradients accumulate up to batch_size; none takes the whole batch at once [samples]."""
    precision: Literal["default", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-emulated"] = "default"
    """Number format of matrix products; default is as PyTorch does it, fp32 is IEEE in convolutions too."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of torch.compile."""
    compile_scope: Literal["model", "blocks", "step"] = "model"
    """What is compiled: the model, each repeated block, or model, loss and the update of an unfused optimizer."""
    channels_last: bool = False
    """Store images and spectrograms as NHWC."""
    attention: Literal["auto", "math", "efficient", "flash", "cudnn"] = "auto"
    """Attention kernel."""
    checkpointing: Literal["off", "blocks", "selective"] = "off"
    """Recompute activations instead of keeping them."""
    fused_optimizer: bool = False
    """Update all weights in one kernel; without, as PyTorch does it (foreach on CUDA)."""
    cache: Literal["off", "disk", "ram", "device"] = "off"
    """Where computed features are kept."""
    cache_of: Literal["features", "waveform"] = "features"
    """What is kept; of int16 waveforms the device computes features."""
    cache_dtype: Literal["float32", "float16"] = "float32"
    """Number format of the cache."""
    decoder: Literal["soundfile", "torchcodec", "librosa"] = "soundfile"
    """What reads audio files."""
    features_on: Literal["cpu", "device"] = "cpu"
    """Where features are computed."""
    shards: bool = False
    """Read tar shards instead of single files."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that load data; 0 loads in the training process."""
    worker_kind: Literal["process", "thread"] = "process"
    """What loads: processes, or threads of one."""
    persistent_workers: bool = False
    """Keep the loading processes from epoch to epoch."""
    prefetch_factor: Count = 2
    """Batches that each loading process prepares ahead [batches]."""
    pin_memory: bool = False
    """Load into page-locked memory, from which a GPU copies faster."""
    prefetch: bool = False
    """Copy the next batch to the device while this one computes."""
    drop_last: bool = False
    """Leave an epoch's last, smaller batch out."""
    bucket: bool = False
    """Batch clips of similar length together."""
    log_every: Count = 10
    """Steps between readings of the loss [steps]."""
    validate_every: Annotated[int, Field(ge=0)] | None = None
    """Steps between evaluations; 0 only at the end, none after each epoch [steps]."""
    on_nonfinite: Literal["raise", "skip", "recover"] = "raise"
    """What a NaN or infinite loss does."""
    allocator: Literal["default", "expandable"] = "default"
    """How GPU memory is handed out."""
    ranks: Count = 1
    """Training processes, one per GPU, of all machines together."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What each rank holds: all weights, or its part of them."""

    @classmethod
    def careful(cls, hardware: Hardware | None = None) -> "Plan":
        """Return what a competent practitioner starts with: workers, pinned memory, tf32, a fused optimizer."""
        return cls(
            precision="tf32",
            fused_optimizer=True,
            workers=min(4, (hardware or this_machine()).cores),
            persistent_workers=True,
            pin_memory=True,
            log_every=50,
        )

    @classmethod
    def fast(cls, hardware: Hardware | None = None) -> "Plan":
        """Return the plan recommended for `hardware` before anything is measured; the climb finds a proven one."""
        hardware = hardware or this_machine()
        on_cpu = hardware.device.type == "cpu"
        # float16 needs loss scaling and is no faster on most CPUs: there only bf16 is worth a try unmeasured.
        half: Literal["bf16", "fp16"] = "bf16" if on_cpu or hardware.supports("bf16") else "fp16"
        return cls(
            precision=half if hardware.supports(half) else "default",
            compile="default" if hardware.supports("compile") else "off",
            channels_last=True,
            fused_optimizer=True,
            cache="ram" if on_cpu else "device",
            cache_dtype="float16",
            pin_memory=hardware.supports("pin_memory"),
            log_every=50,
        )


PRESETS = {"baseline": lambda _: Plan(), "careful": Plan.careful, "fast": Plan.fast}


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
    effective = EffectivePlan(plan, plan)
    # One at a time, and then all are asked again: what one field falls back to may be in the way of another.
    while broken := next(_broken_rules(effective.plan, hardware, workload, batch_size=batch_size), None):
        effective = effective.fall_back(*broken)
    if workload is not None and workload.augment_waveform is not None:
        plan = effective.plan
        if (plan.features_on == "cpu") if plan.cache == "off" else (plan.cache_of == "features"):
            why = "augment_waveform is skipped: it is for waveforms on the device (features_on or cache_of)"
            effective = effective.fall_back("features_on", plan.features_on, why)
    if strict and effective.fallbacks:
        raise PlanError(f"the plan cannot be honoured here, and --strict allows no fallback: {effective.fallbacks[0]}")
    return effective


def _broken_rules(
    plan: Plan, hardware: Hardware, workload: "Workload | None", *, batch_size: int | None
) -> Iterator[Rule]:
    for field, value, capability, instead in NEEDS:
        if getattr(plan, field) == value and not hardware.supports(capability):
            yield field, instead, hardware.why_not(capability)
    yield from _device_rules(plan, hardware)
    if workload is not None:
        yield from _data_rules(plan, workload)
    if plan.cache != "off":
        yield from _cache_rules(plan, hardware)
    if plan.ranks > 1:
        yield from _rank_rules(plan, hardware)
    accumulates = plan.micro_batch == "auto" or (batch_size and plan.micro_batch and plan.micro_batch < batch_size)
    if accumulates and plan.compile in CUDA_GRAPHS and hardware.device.type == "cuda":
        # https://github.com/pytorch/pytorch/issues/169545
        why = "accumulated gradients lie in memory that the next replay of a CUDA graph writes over"
        yield "compile", "default", why


def _device_rules(plan: Plan, hardware: Hardware) -> Iterator[Rule]:
    if hardware.device.type != "cuda":
        if plan.attention in ("efficient", "cudnn"):
            yield "attention", "auto", f"this kernel is one of CUDA's; the device is {hardware.name}"
        if plan.allocator != "default":
            yield "allocator", "default", f"segments are CUDA's way to hand out memory; the device is {hardware.name}"
        if plan.prefetch:
            yield "prefetch", False, f"a copy beside the computation needs a CUDA GPU; the device is {hardware.name}"
    elif plan.prefetch and not plan.pin_memory:
        yield "pin_memory", True, "prefetch copies without waiting, which takes page-locked memory"
    if plan.precision == "fp16" and not plan.fused_optimizer:
        why = "float16 loss scaling skips bad steps on the device, without a host sync, only in a fused optimizer"
        yield "fused_optimizer", True, why


def _data_rules(plan: Plan, workload: "Workload") -> Iterator[Rule]:
    if not workload.cacheable:
        why = f"the items of {workload.name} are slices of memory, or decimal inputs with whole-number targets"
        for field, instead in (("cache", "off"), ("features_on", "cpu"), ("shards", False)):
            if getattr(plan, field) != instead:
                yield field, instead, why
    if workload.length is None:
        if plan.bucket:
            yield "bucket", False, f"all items of {workload.name} have one length: nothing is padded"
        return
    if plan.compile in CUDA_GRAPHS and not plan.bucket:
        why = "lengths differ from batch to batch, and each would be tuned and recorded anew: bucket makes them few"
        yield "compile", "default", why
    why = "lengths differ: features of padded waveforms would depend on the padding"
    if plan.features_on == "device":
        yield "features_on", "cpu", why
    if plan.cache != "off" and plan.cache_of == "waveform":
        yield "cache_of", "features", why


def _cache_rules(plan: Plan, hardware: Hardware) -> Iterator[Rule]:
    if plan.cache == "device" and hardware.device.type == "cpu":
        yield "cache", "ram", "the device is this CPU, whose memory is the RAM"
    if plan.workers != 0:
        yield "workers", 0, "a cached batch is one gather from memory; worker processes would copy it once more"
    if plan.cache_of == "features" and plan.features_on == "device":
        yield "features_on", "cpu", "the cache holds features: there is nothing left to compute on the device"


def _rank_rules(plan: Plan, hardware: Hardware) -> Iterator[Rule]:
    if plan.strategy == "fsdp":
        if plan.compile != "off":
            yield "compile", "off", "compiled code does not gather the weights that fsdp has sharded; ddp compiles"
        if plan.channels_last:
            yield "channels_last", False, "fsdp shards only weights that lie in the usual order"
        if plan.precision.startswith(("fp8", "fp16")):
            half = "bf16" if hardware.supports("bf16") else "default"
            yield "precision", half, "scales of 8-bit layers, or of the loss, would have to be agreed on under fsdp"
        return
    if plan.compile in CUDA_GRAPHS:
        yield "compile", "default", "CUDA graphs keep gradients where ddp does not look for them"
    if plan.compile != "off" and plan.compile_scope == "step":
        yield "compile_scope", "model", "gradients are exchanged between the backward pass and the update"
