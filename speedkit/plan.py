"""Plan: how fast a recipe is learned, one field per optimization. Changing it must not change what is learned."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from torch import distributed

from speedkit.errors import PlanError
from speedkit.hardware import Hardware, this_machine
from speedkit.settings import check, choice, setting

# Field, value, the capability of `Hardware.supports` that it takes, and what it falls back to without, perhaps further.
NEEDS = (
    ("precision", "fp8", "fp8", "bf16"),
    ("precision", "bf16", "bf16", "fp16"),
    ("precision", "fp16", "fp16", "fp32"),
    ("precision", "tf32", "tf32", "fp32"),
    *(("compile", mode, "compile", "off") for mode in ("default", "reduce-overhead", "max-autotune")),
    ("compile", "reduce-overhead", "cuda_graphs", "default"),
    ("attention", "flash", "flash_attention", "auto"),
    ("pin_memory", True, "pin_memory", False),
    *(("decoder", decoder, decoder, "soundfile") for decoder in ("torchcodec", "librosa")),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How fast a recipe is learned. `Plan()` is plain PyTorch with nothing on: the naive baseline of the guides."""

    micro_batch: int | str | None = setting(
        None,
        "samples per forward pass; gradients accumulate up to batch_size; none takes the whole batch at once",
        unit="samples",
        choices=("auto",),
        minimum=1,
    )
    precision: str = choice("number format of matrix products", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-emulated")
    compile: str = choice("torch.compile and its mode", "off", "default", "reduce-overhead", "max-autotune")
    compile_scope: str = choice(
        "what is compiled: the model, each repeated block, or model, loss and the update of an unfused optimizer",
        "model",
        "blocks",
        "step",
    )
    channels_last: bool = setting(False, "store images and spectrograms as NHWC")
    attention: str = choice("which attention kernel", "auto", "math", "efficient", "flash", "cudnn")
    checkpointing: str = choice("recompute activations instead of keeping them", "off", "blocks", "selective")
    fused_optimizer: bool = setting(False, "update all weights in one kernel")
    cache: str = choice("where computed features are kept", "off", "disk", "ram", "device")
    cache_of: str = choice("what is kept; of int16 waveforms the device computes features", "features", "waveform")
    cache_dtype: str = choice("number format of the cache", "float32", "float16")
    decoder: str = choice("what reads audio files", "soundfile", "torchcodec", "librosa")
    features_on: str = choice("where features are computed", "cpu", "device")
    shards: bool = setting(False, "read tar shards instead of single files")
    workers: int | str = setting(
        0,
        "processes that load data; 0 loads in the training process, auto measures what is best",
        choices=("auto",),
        minimum=0,
    )
    worker_kind: str = choice("what loads: processes, or threads of one", "process", "thread")
    persistent_workers: bool = setting(False, "keep the loading processes from epoch to epoch")
    prefetch_factor: int = setting(2, "batches that each loading process prepares ahead", unit="batches", minimum=1)
    pin_memory: bool = setting(False, "load into page-locked memory, from which a GPU copies faster")
    prefetch: bool = setting(False, "copy the next batch to the device while this one computes")
    drop_last: bool = setting(False, "leave an epoch's last, smaller batch out")
    bucket: bool = setting(False, "batch clips of similar length together")
    log_every: int = setting(10, "steps between readings of the loss", unit="steps", minimum=1)
    validate_every: int | None = setting(
        None, "steps between evaluations; 0 only at the end, none after each epoch", unit="steps", minimum=0
    )
    on_nonfinite: str = choice("what a NaN or infinite loss does", "raise", "skip", "recover")
    allocator: str = choice("how GPU memory is handed out", "default", "expandable")
    ranks: int = setting(1, "training processes, one per GPU, of all machines together", minimum=1)
    strategy: str = choice("what each rank holds: all weights, or its part of them", "ddp", "fsdp")

    def __post_init__(self):
        check(self)

    @classmethod
    def careful(cls, hardware: Hardware | None = None) -> "Plan":
        """Return what a competent practitioner starts with: workers, pinned memory, tf32, a fused optimizer."""
        workers = min(4, (hardware or this_machine()).cores)
        return cls(
            precision="tf32",
            fused_optimizer=True,
            workers=workers,
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
        half = "bf16" if hardware.supports("bf16") else "fp16" if hardware.supports("fp16") and not on_cpu else "fp32"
        return cls(
            precision=half,
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
    fallbacks: tuple[Fallback, ...]

    def with_fallbacks(self, *later: Fallback) -> "EffectivePlan":
        """Return what it becomes with fallbacks that came out `later`."""
        plan = dataclasses.replace(self.plan, **{fallback.field: fallback.got for fallback in later})
        return EffectivePlan(self.asked, plan, (*self.fallbacks, *later))


def resolve(plan: Plan, hardware: Hardware | None = None, strict: bool = False, workload: Any = None) -> EffectivePlan:
    """Return the plan that `hardware` (and the data of `workload`) can honour, and why not for each field it cannot.

    Raises PlanError for ranks that it cannot run, and under `strict` for any fallback.
    """
    check_ranks(plan.ranks, hardware or this_machine())
    got, whys = dataclasses.asdict(plan), dict[str, list[str]]()
    for field, value, why in _fallbacks(got, hardware or this_machine(), workload):
        got[field] = value
        whys.setdefault(field, []).append(why)  # a chain (fp8, bf16, fp32) is one fallback, with each reason
    if got["workers"] == 0:
        got["persistent_workers"] = False  # nothing to keep, nothing lost: not a fallback
    fallbacks = tuple(
        Fallback(field, getattr(plan, field), got[field], "; ".join(why).replace(".;", ";"))
        for field, why in whys.items()
    )
    if strict and fallbacks:
        raise PlanError(f"the plan cannot be honoured here, and --strict allows no fallback: {fallbacks[0]}")
    return EffectivePlan(plan, Plan(**got), fallbacks)


def _fallbacks(got: dict[str, Any], hardware: Hardware, workload: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield each field that falls back, its new value and the reason; the caller sets it in `got` before the next."""
    for field, value, capability, instead in NEEDS:
        if got[field] == value and (why := hardware.why_not(capability)):
            yield field, instead, why
    if got["precision"] == "fp16" and not got["fused_optimizer"]:
        why = "float16 loss scaling skips bad steps on the device, without a host sync, only in a fused optimizer"
        yield "fused_optimizer", True, why
    if got["attention"] in ("efficient", "cudnn") and hardware.device.type != "cuda":
        why = f"this kernel is one of CUDA's; {hardware.name} has flash and math, of which it takes what a call allows"
        yield "attention", "auto", why
    if got["on_nonfinite"] != "raise" and not got["fused_optimizer"] and hardware.device.type == "cuda":
        why = "an unfused optimizer cannot leave a step out by itself: the host waits for the device in every step"
        yield "on_nonfinite", got["on_nonfinite"], why
    if got["prefetch"] and hardware.device.type != "cuda":
        yield "prefetch", False, f"a copy beside the computation needs a CUDA GPU; the device is {hardware.name}"
    if got["prefetch"] and not got["pin_memory"]:
        yield "pin_memory", True, "prefetch copies without waiting, which takes page-locked memory"
    if got["allocator"] != "default" and hardware.device.type != "cuda":
        yield "allocator", "default", f"segments are CUDA's way to hand out memory; the device is {hardware.name}"
    if workload is not None and not workload.cacheable:
        why = (
            f"the items of {workload.name} are slices of memory already, so there is nothing to read, compute or keep; "
            "or not what a cache keeps, decimal inputs with whole-number targets"
        )
        for field in ("cache", "features_on", "shards"):
            if got[field] != getattr(Plan(), field):
                yield field, getattr(Plan(), field), why
    if got["cache"] == "device" and hardware.device.type == "cpu":
        yield "cache", "ram", "the device is this CPU, whose memory is the RAM"
    if got["cache"] != "off" and got["workers"] != 0:
        yield "workers", 0, "a cached batch is one gather from memory; worker processes would copy it once more"
    if got["cache"] != "off" and got["cache_of"] == "features" and got["features_on"] == "device":
        yield "features_on", "cpu", "the cache holds features: there is nothing left to compute on the device"
    if workload is not None:
        yield from _for_data(got, workload)
    if got["ranks"] > 1:
        yield from _for_ranks(got, hardware)


def check_ranks(ranks: int, hardware: Hardware) -> None:
    """Raise PlanError where `hardware` has no device for each of those that run on it."""
    here, kind = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks), hardware.device.type
    if ranks == 1:
        return
    if kind == "cuda" and here > hardware.gpu_count:
        raise PlanError(f"ranks={ranks} takes {here} GPUs here, and there are {hardware.gpu_count}: lower ranks")
    if kind not in ("cuda", "cpu"):
        raise PlanError(f"ranks={ranks} takes a CUDA GPU each, or a CPU; the device is {hardware.name}: use ranks=1")
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise PlanError(f"ranks={ranks} takes a PyTorch built with gloo, and this one is not: use ranks=1")
    if kind == "cuda" and not distributed.is_nccl_available():
        raise PlanError(f"ranks={ranks} takes NCCL, and this PyTorch is built without: use ranks=1 or device=cpu")


def _for_ranks(got: dict[str, Any], hardware: Hardware) -> Iterator[tuple[str, Any, str]]:
    """Yield, as `_fallbacks` does, what several ranks cannot do together."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or got["ranks"])
    if hardware.device.type == "cpu" and here > hardware.cores:
        yield "ranks", got["ranks"], f"{here} ranks take turns on {hardware.cores} cores: fewer are as fast"
    if got["compile"] != "off" and got["strategy"] == "fsdp":
        yield "compile", "off", "compiled code does not gather the weights that fsdp has sharded; ddp compiles"
    if got["compile"] in ("reduce-overhead", "max-autotune"):
        yield "compile", "default", "CUDA graphs keep gradients where ddp does not look for them"
    if got["compile"] != "off" and got["compile_scope"] == "step":
        yield "compile_scope", "model", "gradients are exchanged between the backward pass and the update"
    if got["strategy"] == "fsdp":
        if got["channels_last"]:
            yield "channels_last", False, "fsdp shards only weights that lie in the usual order"
        if got["precision"].startswith("fp8"):
            yield "precision", "bf16", "8-bit layers need a gathering of their own under fsdp, which is not offered"
        if got["precision"] == "fp16":
            yield "precision", "bf16", "gradients that overflow in one rank's shard have to scale the loss of all ranks"


def _for_data(got: dict[str, Any], workload: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield, as `_fallbacks` does, what the data of `workload` has no use for."""
    cached = got["cache"] != "off"
    if workload.length is None and got["bucket"]:
        yield "bucket", False, f"all items of {workload.name} have one length: nothing is padded"
    if workload.length is not None and not got["bucket"] and got["compile"] in ("reduce-overhead", "max-autotune"):
        why = "lengths differ from batch to batch, and each would be tuned and recorded anew: bucket makes them few"
        yield "compile", "default", why
    if workload.length is not None:
        why = "lengths differ: features of padded waveforms would depend on the padding"
        if got["features_on"] == "device":
            yield "features_on", "cpu", why
        if cached and got["cache_of"] == "waveform":
            yield "cache_of", "features", why
    waveforms = got["cache_of"] == "waveform" if cached else got["features_on"] == "device"
    if workload.augment_waveform is not None and not waveforms:
        why = "augment_waveform is skipped: it is for waveforms on the device (features_on=device, cache_of=waveform)"
        yield "features_on", got["features_on"], why
