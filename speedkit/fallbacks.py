"""What this machine and this data can honour of a plan, and why not the rest."""

import dataclasses
import os
import textwrap
from typing import Any

from speedkit.data.own_loader import own_settings
from speedkit.display import table
from speedkit.errors import PlanError
from speedkit.machine import Hardware, this_machine
from speedkit.plan import CUDA_GRAPHS, TUNED, Plan, as_plan
from speedkit.workload import Workload

# Field, value, the capability of `Hardware.supports` that it takes, and what it falls back to without. In this order:
# what comes instead may be in a later row.
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
MANY_WORKERS = 16  # at most, on a machine of few cores: reading may take longer than computing
FEW = 2  # fallbacks that are told one by one
# The reasons that several fields share.
MANY_SHAPES = "each length would be tuned or recorded anew: bucket makes them few"
PADDING = "lengths differ: features of padded waveforms would depend on the padding"
COLUMNS = ("field", "asked", "got", "why")
IN_MEMORY = "the items are slices of memory, or decimal inputs with whole-number targets"


@dataclasses.dataclass(frozen=True)
class Fallback:
    """One field of a plan that is not as it was asked, and why."""

    field: str
    asked: Any
    got: Any
    why: str
    lost: bool = True  # False where what is got does the same

    def __str__(self) -> str:
        return f"{self.field}: asked {self.asked}, got {self.got}: {self.why}"


@dataclasses.dataclass
class EffectivePlan:
    """What a plan becomes on a machine: field by field it falls back."""

    asked: Plan
    plan: Plan
    fallbacks: tuple[Fallback, ...] = ()  # one for each field that is not as asked

    def rows(self) -> list[tuple[str, Any, Any, str]]:
        """Return field, asked, got and why of each field that is not as in the baseline."""
        reasons = {fallback.field: fallback.why for fallback in self.fallbacks}
        rows = []
        for field, got in vars(self.plan).items():
            if field in reasons or got != getattr(Plan(), field):
                rows.append((field, getattr(self.asked, field), got, reasons.get(field, "as asked")))
        return rows

    def __repr__(self) -> str:
        lines = []
        for row in (COLUMNS, *self.rows()):
            lines += textwrap.wrap("{!s:18} {!s:15} {!s:15} {}".format(*row), 110, subsequent_indent=" " * 51)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return table("The plan, as it is here", COLUMNS, self.rows())

    @property
    def lost(self) -> list[Fallback]:
        """The fallbacks that cost something; what was to be chosen (auto) has been chosen."""
        return [
            fallback for fallback in self.fallbacks if fallback.lost and fallback.asked not in ("auto", fallback.got)
        ]

    def fall_back(self, field: str, got: Any, why: str, *, lost: bool = True) -> None:
        """Make `field` `got`; nothing changes where it is so already."""
        if getattr(self.plan, field) != got:
            self.add(Fallback(field, getattr(self.asked, field), got, why, lost))

    def add(self, *new: Fallback) -> None:
        """Take `new` fallbacks in. A field that falls back further is still one fallback, with all reasons."""
        fallbacks = {fallback.field: fallback for fallback in self.fallbacks}
        for fallback in new:
            self.plan = dataclasses.replace(self.plan, **{fallback.field: fallback.got})
            before = fallbacks.get(fallback.field)
            if before is not None:
                why = before.why if fallback.why in before.why else f"{before.why}; {fallback.why}"
                fallback = dataclasses.replace(fallback, asked=before.asked, why=why, lost=before.lost or fallback.lost)
            fallbacks[fallback.field] = fallback
        self.fallbacks = tuple(fallbacks.values())

    def notes(self, verbose: bool = False) -> list[str]:
        """Return a sentence for each fallback, or, if not `verbose`, one for those that only lose what was asked."""
        lost = self.lost
        if verbose or len(lost) <= FEW:
            return [str(fallback) for fallback in self.fallbacks]
        names = ", ".join(fallback.field for fallback in lost)
        rest = [str(fallback) for fallback in self.fallbacks if fallback not in lost]
        return [*rest, f"{len(lost)} fields of the plan do not apply here ({names}): --verbose (verbose=True) says why"]

    def check_strict(self) -> None:
        """Raise PlanError where something that was asked is lost."""
        if self.lost:
            raise PlanError(f"the plan cannot be honoured here, and strict=True allows no fallback: {self.lost[0]}")


def resolve(
    plan: Plan | str,
    hardware: Hardware | None = None,
    strict: bool = False,
    *,
    workload: Workload | None = None,
    batch_size: int | None = None,
) -> EffectivePlan:
    """Return the plan that `hardware` (and the data of `workload`) can honour, and why not for each field it cannot.

    The plan may be a name: baseline, careful, fast, or that of a YAML file.
    `batch_size` is the recipe's, where it is known. Raises PlanError for ranks that it cannot run, and under `strict`
    for anything that is lost.
    """
    hardware = hardware or this_machine()
    plan = as_plan(plan, hardware)
    check_ranks(plan, hardware)
    effective = EffectivePlan(plan, plan)
    if workload is not None and workload.own_loader is not None:
        effective.plan = dataclasses.replace(plan, **own_settings(workload.own_loader.loader, plan))
    # In this order: what a field falls back to is looked at by the rules after it.
    machine_rules(effective, hardware)
    if workload is not None:
        data_rules(effective, workload, hardware)
    cache_rules(effective)
    rank_rules(effective, hardware)
    graph_rules(effective, hardware, batch_size=batch_size)
    format_rules(effective)
    if strict:
        effective.check_strict()
    return effective


def check_ranks(plan: Plan, hardware: Hardware) -> None:
    """Raise PlanError where this machine has fewer GPUs than its part of the ranks takes, or they would share one."""
    if plan.ranks == 1 or hardware.device.type == "cpu":
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or plan.ranks)  # torchrun's: of several machines, those of this one
    if here > hardware.gpu_count:
        raise PlanError(f"ranks={plan.ranks} takes {here} GPUs here, and there are {hardware.gpu_count}: lower ranks")
    own = hardware.device.index
    if here > 1 and own is not None and own != int(os.environ.get("LOCAL_RANK", -1)):
        raise PlanError(
            f'device="{hardware.device}" is one GPU, and ranks={plan.ranks} take one each: device="cuda" gives them '
            f"cuda:0 to cuda:{here - 1}, and CUDA_VISIBLE_DEVICES says which those are"
        )


def machine_rules(effective: EffectivePlan, hardware: Hardware) -> None:
    """Leave of `effective` what the device and its software can do."""
    for field, value, capability, instead in NEEDS:
        if getattr(effective.plan, field) == value and not hardware.supports(capability):
            effective.fall_back(field, instead, hardware.why_not(capability))
    if not hardware.supports("workers"):
        effective.fall_back("workers", 0, hardware.why_not("workers"))
    if effective.asked.workers > max(MANY_WORKERS, 2 * hardware.cores):
        why = f"so many worker processes would only wait for the {hardware.cores} cores of this machine"
        effective.fall_back("workers", hardware.cores, why)
    if effective.plan.cache == "device" and hardware.device.type == "cpu":
        effective.fall_back("cache", "ram", "the CPU's memory is the RAM", lost=False)
    if effective.plan.prefetch:
        why = "prefetch copies without waiting, which takes page-locked memory"
        effective.fall_back("pin_memory", True, why, lost=False)


def data_rules(effective: EffectivePlan, workload: Workload, hardware: Hardware) -> None:
    """Leave of `effective` what the items of `workload`, or its author's loader, can be."""
    if workload.own_loader is not None:
        for field, instead, why in workload.own_loader.rules():
            effective.fall_back(field, instead, why)
    if not workload.cacheable:
        if workload.rows is None or effective.plan.cache != "device":  # rows are entries already
            effective.fall_back("cache", "off", IN_MEMORY)
        effective.fall_back("features_on", "cpu", IN_MEMORY)
    if workload.length is None:
        effective.fall_back("bucket", False, "all items have one length: nothing is padded")
    else:
        length_rules(effective, hardware)
    plan = effective.plan
    waveforms = plan.features_on == "device" if plan.cache == "off" else plan.cache_of == "waveform"
    if workload.augment_waveform is not None and not waveforms:
        why = "augment_waveform is skipped: it is for waveforms on the device (features_on or cache_of)"
        effective.add(Fallback("features_on", plan.features_on, plan.features_on, why))


def length_rules(effective: EffectivePlan, hardware: Hardware) -> None:
    """Leave of `effective` what clips of different lengths allow."""
    effective.fall_back("features_on", "cpu", PADDING)
    if effective.plan.cache != "off":
        effective.fall_back("cache_of", "features", PADDING)
    if effective.plan.bucket:
        return
    effective.fall_back("cudnn_benchmark", False, MANY_SHAPES)
    if effective.plan.compile in TUNED:
        effective.fall_back("compile", "default", MANY_SHAPES)
    plan = effective.plan
    # Which is what PyTorch takes by itself from Hopper on.
    by_itself = plan.precision in SHORT and (hardware.compute_capability or (0, 0)) >= (9, 0)
    if plan.attention == "cudnn" or (plan.attention == "auto" and by_itself):
        why = f"cuDNN plans attention by shape: {MANY_SHAPES}, varlen needs no plan"
        effective.fall_back("attention", "flash", why)


def cache_rules(effective: EffectivePlan) -> None:
    """Take from `effective` what a cache has no use for."""
    if effective.plan.cache == "off":
        return
    why = "a cached batch is one gather from memory; worker processes would copy it once more"
    effective.fall_back("workers", 0, why, lost=False)
    if effective.plan.cache_of == "features":
        why = "the cache holds features: none are computed"
        effective.fall_back("features_on", "cpu", why, lost=False)


def rank_rules(effective: EffectivePlan, hardware: Hardware) -> None:
    """Leave of `effective` what weights that are shared out between ranks allow."""
    if effective.plan.ranks == 1:
        return
    if effective.plan.strategy == "ddp":
        why = "ddp exchanges a block's gradients while others are computed; a model compiled whole has all at its end"
        if effective.plan.compile != "off":
            effective.fall_back("compile_scope", "blocks", why, lost=False)
        return
    why = "compiled code does not gather the weights that fsdp has sharded; ddp compiles"
    effective.fall_back("compile", "off", why)
    effective.fall_back("channels_last", False, "fsdp shards only weights that lie in the usual order")
    if effective.plan.precision in ("fp16", "fp8", "fp8-emulated"):
        instead = "bf16" if hardware.supports("bf16") else "default"
        effective.fall_back("precision", instead, "fsdp ranks do not agree on scales")


def graph_rules(effective: EffectivePlan, hardware: Hardware, *, batch_size: int | None) -> None:
    """Take from `effective` CUDA graphs where they would write over gradients that are still needed."""
    plan = effective.plan
    if plan.compile not in CUDA_GRAPHS:
        return
    if plan.ranks > 1:
        effective.fall_back("compile", "default", "CUDA graphs keep gradients where ddp does not look for them")
    accumulates = plan.micro_batch == "auto"
    if isinstance(plan.micro_batch, int) and batch_size is not None:
        accumulates = plan.micro_batch < batch_size
    if accumulates and hardware.device.type == "cuda":
        # https://github.com/pytorch/pytorch/issues/169545
        effective.fall_back("compile", "default", "a CUDA graph's replay writes over summed gradients")


def format_rules(effective: EffectivePlan) -> None:
    """Leave of `effective` what goes along with its number format."""
    if effective.plan.precision == "fp16":
        why = "only it skips bad steps of float16 without a host sync"
        effective.fall_back("fused_optimizer", True, why, lost=False)
    if effective.plan.attention == "varlen" and effective.plan.precision not in SHORT:
        effective.fall_back("attention", "auto", "varlen takes 16 bits")
