"""Plan: how fast a recipe is learned, one field per optimization. Changing it must not change what is learned."""

import dataclasses
from typing import Any

from speedkit.errors import PlanError
from speedkit.hardware import Hardware, this_machine
from speedkit.settings import check, setting

# What other tools and guides call a field, and where it lives here.
FORMERLY = {
    **dict.fromkeys(("num_workers", "dataloader_num_workers", "dataloader_workers", "num-workers"), "workers"),
    **dict.fromkeys(("amp", "use_amp", "mixed_precision", "fp16", "bf16", "use_fp16", "autocast"), "precision"),
    **dict.fromkeys(("torch_compile", "use_compile", "compile_mode"), "compile"),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps", "grad_accum"),
        "micro_batch (accumulation follows from the recipe's batch_size)",
    ),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "checkpointing"),
    **dict.fromkeys(("log_interval", "log_every_n_steps", "logging_steps"), "log_every"),
    **dict.fromkeys(("val_check_interval", "eval_steps", "check_val_every_n_epoch"), "validate_every"),
    **dict.fromkeys(("non_blocking", "async_copy"), "prefetch"),
    **dict.fromkeys(("cache_spectrograms", "use_cache", "cache_in_ram", "cache_images"), "cache"),
    **dict.fromkeys(("memory_format", "nhwc"), "channels_last"),
    **dict.fromkeys(("flash_attention", "use_flash_attention", "attn_implementation"), "attention"),
    **dict.fromkeys(("devices", "gpus", "num_gpus", "world_size"), "ranks"),
    **dict.fromkeys(("batch_size", "learning_rate", "lr", "epochs", "seed", "weight_decay"), "a field of the Recipe"),
}

# Values whose technique is not part of this version. They are refused, never ignored.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "micro_batch": ("auto",),
    "precision": ("fp8", "fp8-emulated"),
    "compile_scope": ("blocks", "step"),
    "attention": ("math", "efficient", "flash", "cudnn"),
    "checkpointing": ("blocks", "selective"),
    "on_nonfinite": ("skip", "recover"),
    "allocator": ("expandable",),
    "strategy": ("fsdp",),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How fast a recipe is learned. `Plan()` is plain PyTorch with nothing on: the naive baseline of the guides."""

    micro_batch: int | str | None = setting(
        None, "samples per forward pass; gradients accumulate up to batch_size; none takes the whole batch at once",
        unit="samples", choices=("auto",), minimum=1,
    )  # fmt: skip
    precision: str = setting(
        "fp32", "number format of matrix products", choices=("fp32", "tf32", "bf16", "fp16", "fp8", "fp8-emulated")
    )
    compile: str = setting(
        "off", "torch.compile and its mode", choices=("off", "default", "reduce-overhead", "max-autotune")
    )
    compile_scope: str = setting("model", "what is compiled", choices=("model", "blocks", "step"))
    channels_last: bool = setting(False, "store images and spectrograms as NHWC")
    attention: str = setting(
        "auto", "which attention kernel", choices=("auto", "math", "efficient", "flash", "cudnn")
    )
    checkpointing: str = setting(
        "off", "recompute activations instead of keeping them", choices=("off", "blocks", "selective")
    )
    fused_optimizer: bool = setting(False, "update all weights in one kernel")
    cache: str = setting("off", "where computed features are kept", choices=("off", "disk", "ram", "device"))
    cache_of: str = setting(
        "features", "what the cache keeps: features, or int16 waveforms, with features computed on the device",
        choices=("features", "waveform"),
    )  # fmt: skip
    cache_dtype: str = setting("float32", "number format of the cache", choices=("float32", "float16"))
    decoder: str = setting("soundfile", "what reads audio files", choices=("soundfile", "torchcodec", "librosa"))
    features_on: str = setting("cpu", "where features are computed", choices=("cpu", "device"))
    shards: bool = setting(False, "read tar shards instead of single files")
    workers: int | str = setting(
        0, "processes that load data; 0 loads in the training process, auto measures what is best",
        choices=("auto",), minimum=0,
    )  # fmt: skip
    worker_kind: str = setting("process", "what loads: processes, or threads of one", choices=("process", "thread"))
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
    on_nonfinite: str = setting("raise", "what a NaN or infinite loss does", choices=("raise", "skip", "recover"))
    allocator: str = setting("default", "how GPU memory is handed out", choices=("default", "expandable"))
    ranks: int = setting(1, "training processes, one per GPU", minimum=1)
    strategy: str = setting("ddp", "how ranks share the work", choices=("ddp", "fsdp"))

    def __post_init__(self):
        check(self)

    @classmethod
    def careful(cls, hardware: Hardware | None = None) -> "Plan":
        """Return what a competent practitioner starts with: workers, pinned memory, tf32, a fused optimizer."""
        hardware = hardware or this_machine()
        return cls(
            precision="tf32",
            fused_optimizer=True,
            workers=min(4, hardware.cores),
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
        half = "bf16" if hardware.supports("bf16") else "fp16" if hardware.supports("fp16") and not on_cpu else ""
        return cls(
            precision=half or "fp32",
            compile="default" if hardware.supports("compile") else "off",
            channels_last=True,
            fused_optimizer=True,
            cache="ram" if on_cpu else "device",
            cache_dtype="float16",
            pin_memory=hardware.supports("pin_memory"),
            log_every=50,
        )


PRESETS = ("baseline", "careful", "fast")


def preset(name: str, hardware: Hardware | None = None) -> Plan:
    """Return the plan called `name`, one of PRESETS."""
    return Plan() if name == "baseline" else Plan.careful(hardware) if name == "careful" else Plan.fast(hardware)


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
class Effective:
    """What a plan becomes on a machine."""

    asked: Plan
    plan: Plan
    fallbacks: tuple[Fallback, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return both plans and the fallbacks, JSON-ready."""
        return dataclasses.asdict(self)


def resolve(plan: Plan, hardware: Hardware | None = None, strict: bool = False, workload: Any = None) -> Effective:
    """Return the plan that `hardware` (and the data of `workload`) can honour, and why not for each field it cannot.

    Raises PlanError for a value whose technique is not in this version, and under `strict` for any fallback.
    """
    hardware = hardware or this_machine()
    got = dataclasses.asdict(plan)
    fallbacks: list[Fallback] = []

    def fall_back(field: str, value: Any, why: str) -> None:
        # A chain (fp8 -> bf16 -> fp32) is one fallback, with each reason.
        earlier = [item for item in fallbacks if item.field == field]
        whys = "; ".join([*(item.why for item in earlier), why])
        fallbacks[:] = [item for item in fallbacks if item.field != field]
        fallbacks.append(Fallback(field, getattr(plan, field), value, whys))
        got[field] = value

    _precision(got, hardware, fall_back)
    if got["compile"] != "off" and not hardware.supports("compile"):
        fall_back("compile", "off", hardware.why_not("compile"))
    if got["compile"] == "reduce-overhead" and not hardware.supports("cuda_graphs"):
        fall_back("compile", "default", f"reduce-overhead replays CUDA graphs: {hardware.why_not('cuda_graphs')}")
    if got["pin_memory"] and not hardware.supports("pin_memory"):
        fall_back("pin_memory", False, hardware.why_not("pin_memory"))
    if got["prefetch"] and hardware.device.type != "cuda":
        fall_back("prefetch", False, f"a copy beside the computation needs a CUDA GPU; the device is {hardware.name}")
    if got["prefetch"] and not got["pin_memory"]:
        fall_back("pin_memory", True, "prefetch copies without waiting, which takes page-locked memory")
    if got["decoder"] != "soundfile" and not hardware.supports(got["decoder"]):
        fall_back("decoder", "soundfile", hardware.why_not(got["decoder"]))
    if got["cache"] == "device" and hardware.device.type == "cpu":
        fall_back("cache", "ram", "the device is this CPU, whose memory is the RAM")
    if got["cache"] != "off" and got["workers"] != 0:
        fall_back("workers", 0, "a cached batch is one gather from memory; worker processes would copy it once more")
    if got["cache"] != "off" and got["cache_of"] == "features" and got["features_on"] == "device":
        fall_back("features_on", "cpu", "the cache holds features: there is nothing left to compute on the device")
    if workload is not None:
        _data(got, workload, fall_back)
    if got["persistent_workers"] and got["workers"] == 0:
        got["persistent_workers"] = False  # nothing to keep, nothing lost: not a fallback
    for field, values in NOT_YET.items():
        if got[field] in values and type(got[field]) is type(values[0]):
            raise PlanError(
                f"{field}={got[field]} is not available in this version of speedkit; "
                f"use {field}={Plan.__dataclass_fields__[field].default}"
            )
    if got["ranks"] != 1:
        raise PlanError(f"ranks={got['ranks']} is not available in this version of speedkit; use ranks=1")
    if strict and fallbacks:
        raise PlanError(f"the plan cannot be honoured here, and --strict allows no fallback: {fallbacks[0]}")
    return Effective(plan, Plan(**got), tuple(fallbacks))


def _data(got: dict[str, Any], workload: Any, fall_back) -> None:
    """Switch off what the workload's data has no use for."""
    if workload.length is None and got["bucket"]:
        fall_back("bucket", False, f"all items of {workload.name} have one length: nothing is padded")
    if workload.length is not None and got["features_on"] == "device":
        fall_back("features_on", "cpu", "lengths differ: features of padded waveforms would depend on the padding")
    if workload.length is not None and got["cache"] != "off" and got["cache_of"] == "waveform":
        fall_back("cache_of", "features", "lengths differ: features of padded waveforms would depend on the padding")
    waveforms = got["features_on"] == "device" if got["cache"] == "off" else got["cache_of"] == "waveform"
    if workload.augment_waveform is not None and not waveforms:
        why = "augment_waveform is skipped: it is for waveforms on the device (features_on=device, cache_of=waveform)"
        fall_back("features_on", got["features_on"], why)


def _precision(got: dict[str, Any], hardware: Hardware, fall_back) -> None:
    """Lower the precision to what the device does fast; float16 brings the fused optimizer with it."""
    if got["precision"] == "fp8" and not hardware.supports("fp8"):
        fall_back("precision", "bf16", hardware.why_not("fp8"))
    if got["precision"] == "bf16" and not hardware.supports("bf16"):
        on_gpu = hardware.device.type != "cpu" and hardware.supports("fp16")
        fall_back("precision", "fp16" if on_gpu else "fp32", hardware.why_not("bf16"))
    if got["precision"] in ("tf32", "fp16") and not hardware.supports(got["precision"]):
        fall_back("precision", "fp32", hardware.why_not(got["precision"]))
    if got["precision"] == "fp16" and not got["fused_optimizer"]:
        why = "float16 loss scaling skips bad steps on the device, without a host sync, only in a fused optimizer"
        fall_back("fused_optimizer", True, why)
