"""Plan: how fast a recipe is learned, one field per optimization. Changing it must not change what is learned."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from speedkit.config import from_yaml, nearest, settings
from speedkit.errors import PlanError
from speedkit.machine import Hardware, this_machine

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that record them
TUNED = (*CUDA_GRAPHS, "max-autotune-no-cudagraphs")  # and those that do more for each shape than to generate code
Count = Annotated[int, Field(ge=1)]


@settings
class Plan:
    """How fast a recipe is learned. `Plan()` is PyTorch as it comes, no switch touched: the baseline.

    Each field promises what becomes of the losses when it changes: the same bits; the same losses, within what another
    seed makes of them; or other batches of the same items.
    """

    micro_batch: Count | Literal["auto"] | None = None
    """Samples per forward pass; gradients accumulate up to batch_size; none takes the whole batch at once [samples].
    Same losses within another seed's."""
    precision: Literal["default", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-emulated"] = "default"
    """Number format of matrix products; default is as PyTorch does it, fp32 is IEEE in convolutions too.
    Same losses within another seed's."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "off"
    """Mode of torch.compile. Same losses within another seed's."""
    compile_scope: Literal["model", "blocks"] = "model"
    """What is compiled: the model, or each of its repeated blocks. Same losses within another seed's."""
    channels_last: bool = False
    """Store images and spectrograms as NHWC. Same losses within another seed's."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each shape of a convolution, and take the fastest.
    Same losses within another seed's."""
    attention: Literal["auto", "math", "efficient", "flash", "cudnn", "varlen"] = "auto"
    """Attention kernel; varlen is flash that gets the clips' lengths, where the model passes them on.
    Same losses within another seed's."""
    checkpointing: Literal["off", "blocks", "selective"] = "off"
    """Recompute activations instead of keeping them. Same bits."""
    fused_optimizer: bool = False
    """Update all weights in one kernel; without, as PyTorch does it (foreach on CUDA).
    Same losses within another seed's."""
    cache: Literal["off", "disk", "ram", "device"] = "off"
    """Where computed features are kept. Same bits."""
    cache_of: Literal["features", "waveform"] = "features"
    """What is kept; of int16 waveforms the device computes features. Same losses within another seed's."""
    cache_dtype: Literal["float32", "float16"] = "float32"
    """Number format of the cache. Same losses within another seed's."""
    decoder: Literal["soundfile", "torchcodec"] = "soundfile"
    """What reads audio files. Same losses within another seed's."""
    features_on: Literal["cpu", "device"] = "cpu"
    """Where features are computed. Same losses within another seed's."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that load data; 0 loads in the training process. Same bits."""
    persistent_workers: bool = False
    """Keep the loading processes from epoch to epoch. Same bits."""
    prefetch_factor: Count = 2
    """Batches that each loading process prepares ahead [batches]. Same bits."""
    pin_memory: bool = False
    """Load into page-locked memory, from which a GPU copies faster. Same bits."""
    prefetch: bool = False
    """Copy the next batch to the device while this one computes. Same bits."""
    bucket: bool = False
    """Batch clips of similar length together, and as many frames where the loss is a mean over these.
    Other batches of the same items."""
    log_every: Count = 10
    """Steps between readings of the loss [steps]. Same bits."""
    validate_every: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0.01, le=1)] | None = None
    """Steps between evaluations, or 0.5 for half an epoch; 0 only at the end, none after each epoch [steps].
    Same bits."""
    allocator: Literal["default", "expandable", "keep"] = "default"
    """How memory is handed out: expandable grows a GPU's segments; keep lets glibc keep freed RAM, which nothing undoes
    within the process, so it is in no preset, and is measured in processes of its own. Same bits."""
    threads: Count | None = None
    """Threads that PyTorch takes within one operation on the CPU; none is as many as the process has [threads].
    Same losses within another seed's."""
    ranks: Count = 1
    """Training processes, one per GPU, of all machines together. Same losses within another seed's."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What each rank holds: all weights, or its part of them. Same losses within another seed's."""

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
        """Return the plan recommended for `hardware` before anything is measured; the tuning finds a proven one."""
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


def as_plan(plan: Plan | str, hardware: Hardware | None = None) -> Plan:
    """Return `plan`, or the one that a word or a YAML file names. Raises PlanError for a word that names none."""
    if isinstance(plan, Plan):
        return plan
    if plan in PRESETS:
        return PRESETS[plan](hardware)
    if Path(plan).exists():
        return from_yaml(Plan, plan)
    raise PlanError(f"there is no plan {plan!r}{nearest(plan, PRESETS)}: take {', '.join(PRESETS)}, or a YAML file")
