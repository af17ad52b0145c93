"""The rungs of the climb, a table: what each changes and what it promises; and which of them to try next."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from speedkit.config import nearest
from speedkit.errors import UsageError
from speedkit.hardware import Hardware
from speedkit.measure.stages import Stages
from speedkit.plan import Plan, resolve
from speedkit.predict import LOADING, Change, Profile, changed, middle, text
from speedkit.recipe import Recipe

WORTH = 1.01  # what can gain less at best is not tried
AGAIN = 1.05  # what was rejected is tried once more when it promises so many times as much
COMPILED = {"compile", "compile_scope", "micro_batch", "precision", "channels_last", "attention", "bucket"}
COMPILING_S = 45.0  # on two cores 13 to 60
# What a row of `rungs` holds once it has been measured; None before.
MEASURED = ("ratio", "low", "high", "noise_floor", "parity", "step_s_before", "step_s_after", "data_s", "compile_s")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One optimization: each of its `changes` of the best plan so far is a candidate.

    `promises` says what it leaves of the losses: bit-equal, loss-equal (they move less than by another seed), or
    order-equal (other batches of the same items: their mean moves less).
    """

    name: str
    changes: Callable[[Plan, Recipe, Hardware], list[Change]]
    promises: str
    claims: tuple[str, ...]
    notebook: str
    needs: str = ""  # a capability of the machine without which there is nothing to try


def _workers(plan: Plan, _: Recipe, hardware: Hardware) -> list[Change]:
    counts = [hardware.cores] if hardware.cores <= 4 else [4, min(16, hardware.cores - 1)]
    pinned = {"pin_memory": True} if hardware.supports("pin_memory") else {}
    processes = [{"workers": count, "persistent_workers": True, **pinned} for count in counts]
    return [*processes, {"workers": counts[0], "worker_kind": "thread", **pinned}] if plan.cache == "off" else []


def _cache(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    places = ["disk", "ram"] if hardware.device.type == "cpu" else ["ram", "device"]
    return [{"cache": place, "cache_dtype": "float16", "workers": 0, "persistent_workers": False} for place in places]


def _precision(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    # On a GPU fp16 needs loss scaling and is rarely faster than bf16: it is tried only where bf16 is missing.
    wanted = ["tf32", "bf16"] if hardware.supports("bf16") else ["fp16"]
    return [{"precision": name} for name in wanted if hardware.supports(name)]


def _compile(_: Plan, __: Recipe, hardware: Hardware) -> list[Change]:
    if not hardware.supports("compile"):
        return []
    changes = [{"compile": "default"}, {"compile": "default", "compile_scope": "step"}]
    return [*changes, *[{"compile": "reduce-overhead", "compile_scope": "model"}] * hardware.supports("cuda_graphs")]


# Each field that makes training faster on some machine. Not here: what saves memory for time (checkpointing, allocator)
# and what leaves out something that the recipe asks for (drop_last, validate_every).
LADDER: tuple[Rung, ...] = (
    Rung("workers", _workers, "bit-equal", ("C06", "C07", "C08"), "10_dataloader"),
    Rung("cache", _cache, "loss-equal", ("C09", "C10"), "12_feature_cache"),
    # These make loading quicker, which a cache spares.
    Rung(
        "decoder",
        lambda plan, _, hardware: (
            [{"decoder": "torchcodec"}] * (plan.cache == "off" and hardware.supports("torchcodec"))
        ),
        "loss-equal",
        ("C42",),
        "11_decoding",
        needs="torchcodec",
    ),
    Rung(
        "features_on",
        lambda plan, _, hardware: [{"features_on": "device"}] * (plan.cache == "off" and hardware.device.type != "cpu"),
        "loss-equal",
        (),
        "11_decoding",
    ),
    Rung("shards", lambda plan, *_: [{"shards": True}] * (plan.cache == "off"), "bit-equal", ("C12",), "13_shards"),
    Rung(
        "prefetch",
        lambda plan, _, hardware: (
            [{"prefetch": True, "pin_memory": True}] * (plan.cache != "device" and hardware.supports("pin_memory"))
        ),
        "bit-equal",
        ("C36",),
        "14_prefetch",
        needs="pin_memory",
    ),
    Rung("bucket", lambda *_: [{"bucket": True}], "order-equal", (), "10_dataloader"),
    Rung(
        "host_syncs", lambda *_: [{"fused_optimizer": True, "log_every": 50}], "loss-equal", ("C22",), "26_host_syncs"
    ),
    Rung(
        "micro_batch",
        lambda _, recipe, __: [
            {"micro_batch": recipe.batch_size // parts} for parts in (2, 4) if recipe.batch_size // parts >= 4
        ],
        "loss-equal",
        (),
        "20_batch_size",
    ),
    Rung("precision", _precision, "loss-equal", ("C01", "C02", "C04", "C38"), "21_mixed_precision", needs="bf16"),
    Rung("channels_last", lambda *_: [{"channels_last": True}], "loss-equal", ("C19",), "24_channels_last"),
    Rung("compile", _compile, "loss-equal", ("C16", "C18"), "23_compile", needs="compile"),
    # Left alone, PyTorch takes flash where it can; on a CPU there is nothing else that is fast.
    Rung(
        "attention",
        lambda _, __, hardware: (
            [{"attention": "cudnn"}] * (hardware.device.type == "cuda" and hardware.supports("flash_attention"))
        ),
        "loss-equal",
        ("C35",),
        "25_attention",
    ),
    # Against bf16 and compiled: 8-bit layers that are not compiled round in kernels of their own.
    Rung(
        "fp8",
        lambda *given: [{"precision": "fp8"}] * given[-1].supports("fp8"),
        "loss-equal",
        ("C34",),
        "22_fp8",
        needs="fp8",
    ),
)


def named(names: Sequence[str] | None) -> list[Rung]:
    """Return the rungs of these names, by default all. Raises UsageError for a name that none has."""
    known = [rung.name for rung in LADDER]
    for name in names or ():
        if name not in known:
            raise UsageError(f"there is no rung {name!r}{nearest(name, known)}: take {', '.join(known)}")
    return [rung for rung in LADDER if names is None or rung.name in names]


def candidates(
    job: Stages, chosen: Sequence[Rung], best: Plan, profile: Profile, control: Row, rows: list[Row]
) -> list[Row]:
    """Return the rows of what is left to try on top of `best`, the most promising first; `why` says why it need not be.

    Of what `rows` has, one that was rejected as too slow is there once more when it promises more now.
    """
    found = list[Row]()
    building_s = len(job.workload.train) / job.recipe.batch_size * profile.of(LOADING) / job.hardware.cores
    for rung in chosen:
        for change in rung.changes(best, job.recipe, job.hardware) or [{}]:
            low, high = profile.predict({field: new for field, new in change.items() if new != getattr(best, field)})
            before = [row for row in rows if row["rung"] == rung.name and (row["change"] == text(change) or not change)]
            slow = [
                row["ratio"]
                and row["low"] <= row["noise_floor"]
                and middle((low, high)) >= AGAIN * middle((row["predicted_low"], row["predicted_high"]))
                for row in before
            ]
            compiles = dataclasses.replace(best, **change).compile != "off" and bool(COMPILED & change.keys())
            why = _why_not(job, rung, best, change, high, compiles and control["shapes"])
            if before and (why or slow != [True]):
                continue
            caches = best.cache == "off" != change.get("cache", "off")
            found.append(
                {
                    "rung": rung.name,
                    "change": text(change),
                    "fields": change,
                    "promises": rung.promises,
                    "stage": f"rung {rung.name}: {text(change)}{' again' * len(before)}",
                    "compiles": compiles,
                    "set_up_s": control["set_up_s"] + building_s * caches + COMPILING_S * compiles,
                    "predicted_low": low if change else None,
                    "predicted_high": high if change else None,
                    **dict.fromkeys(MEASURED),
                    "kept": False,
                    "why": why,
                    "claims": list(rung.claims),
                    "notebook": rung.notebook,
                }
            )
    return sorted(found, key=lambda row: -middle((row["predicted_low"] or 0.0, row["predicted_high"] or 0.0)))


def _why_not(job: Stages, rung: Rung, best: Plan, change: Change, most: float, shapes: int) -> str:
    """Return why a change that can gain `most`, compiled for batches of so many `shapes`, need not be tried, or ""."""
    if not change:
        lacking = job.hardware.why_not(rung.needs) if rung.needs else ""
        return lacking or f"nothing to try on top of {text(changed(best))}"
    now, new = (
        resolve(plan, job.hardware, workload=job.workload, batch_size=job.recipe.batch_size)
        for plan in (best, dataclasses.replace(best, **change))
    )
    if new.plan == now.plan:
        return next((fallback.why for fallback in new.fallbacks if fallback.field in change), "changes nothing")
    if shapes > 2 and job.workload.length is None:
        return f"not tried: batches came in {shapes} shapes, each of which would be compiled anew"
    return f"not tried: it could gain {most:.3f} at most" if most < WORTH else ""
