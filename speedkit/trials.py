"""Rungs tried: each candidate is predicted, measured against the best plan so far, and kept or rejected."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from speedkit.ceilings import matmul_rates
from speedkit.climb_state import ClimbState, Row, measured
from speedkit.data.sampler import BatchSampler, padded_frames
from speedkit.errors import UsageError
from speedkit.ladder import Change, Rung, changed, plan_of, predict, text
from speedkit.measure.ledger import ledger_of
from speedkit.measure.quality import parity
from speedkit.measure.stats import WORTH
from speedkit.plan import Plan, resolve

RUNGS_SHARE = 0.6  # of the budget: no rung is begun after that
COMPILING_S = {"cpu": 45.0}  # of a model; on two cores 13 to 60, on a GPU about 25
AGAIN = ", again"  # where time is left, what was undecided is measured once more
COMPILED = {"compile", "compile_scope", "micro_batch", "precision", "channels_last", "attention", "bucket"}
# What a row of `rungs` holds once it has been measured; None before.
MEASURED = ("ratio", "low", "high", "parity", "step_s_before", "step_s_after", "compile_s")


def ledger_for(job: ClimbState, plan: Plan) -> Row:
    """Return where a step's time goes under `plan`."""
    return job.once(
        f"ledger of {text(changed(plan))}",
        lambda: ledger_of(job.workload, job.recipe, plan, **job.options).as_dict(),
    )


def try_rungs(job: ClimbState, chosen: Sequence[Rung], control: Row) -> list[Row]:
    """Try the most promising candidate until none is left or the time is up; return a row for each, tried or not."""
    matmul = matmul_rates(job.hardware)
    rows = list[Row]()
    while True:
        best = plan_of([row for row in rows if row["kept"]])
        ledger = ledger_for(job, best)
        shares = {row["cause"]: row["share"] for row in ledger["rows"]}
        if not rows or rows[-1]["kept"]:
            shown = (f"{cause} {share:.0%}" for cause, share in shares.items() if abs(share) > 0.005)
            job.say(f"time goes into {', '.join(shown)}")
        found = [
            candidate(job, rung, change, best, shares=shares, control=control, matmul=matmul)
            for rung in chosen
            for change in rung.changes(best, job.recipe, job.hardware) or [{}]
        ]
        tried = {name for row in rows for name in (row["stage"], f"rung {row['rung']}: {text({})}")}
        undecided = {row["stage"] for row in rows if row["why"] == "undecided"}
        again = [row | {"stage": row["stage"] + AGAIN} for row in found if row["stage"] in undecided]
        found = [row for row in found if row["stage"] not in tried]
        waiting = [row for row in found if not row["why"]]
        waiting = waiting or [row for row in again if row["stage"] not in tried and not row["why"]]
        late = job.spent_s() > RUNGS_SHARE * job.budget_s
        if late:
            waiting = [row for row in waiting if row["stage"] in job.state["stages"]]  # of a climb that goes on
        if not waiting:
            if late and not rows and not all(row["why"] for row in found):
                _too_short(job)
            return rows + [row | {"why": row["why"] or "not tried: the time for rungs is used up"} for row in found]
        first = max(waiting, key=lambda row: math.sqrt(row["predicted_low"] * row["predicted_high"]))
        rows.append(job.once(first["stage"], functools.partial(_try, job, first, best, control)))


def candidate(
    job: ClimbState, rung: Rung, change: Change, best: Plan, *, shares: Row, control: Row, matmul: dict[str, float]
) -> Row:
    """Return the row of a change of the `best` plan; `why` says why it need not be tried."""
    change = {field: value for field, value in change.items() if value != getattr(best, field)}
    frames = job.once("frames saved by buckets", lambda: _frames_saved(job)) if "bucket" in change else 1.0
    on_cpu = job.hardware.device.type == "cpu"
    low, high = predict(change, shares, matmul=matmul, precision=best.precision, frames=frames, on_cpu=on_cpu)
    return {
        "rung": rung.name,
        "change": text(change),
        "fields": change,
        "promises": rung.promises,
        "stage": f"rung {rung.name}: {text(change)}",
        "compiles": dataclasses.replace(best, **change).compile != "off" and bool(COMPILED & change.keys()),
        "predicted_low": low if change else None,
        "predicted_high": high if change else None,
        **dict.fromkeys(MEASURED),
        "kept": False,
        "why": _why_not(job, rung, best, change, high=high, control=control),
        "claims": list(rung.claims),
        "notebook": rung.notebook,
    }


def _why_not(job: ClimbState, rung: Rung, best: Plan, change: Change, *, high: float, control: Row) -> str:
    """Return why a change that can make steps `high` times as fast need not be tried, or ""."""
    if not change:
        lacking = job.hardware.why_not(rung.needs) if rung.needs else ""
        return lacking or f"nothing to try on top of {text(changed(best))}"
    plans = best, dataclasses.replace(best, **change)
    batch_size = job.recipe.batch_size
    old, new = (resolve(plan, job.hardware, workload=job.workload, batch_size=batch_size) for plan in plans)
    if new.plan == old.plan:
        return next((fallback.why for fallback in new.fallbacks if fallback.field in change), "changes nothing")
    if math.log(high) < WORTH:
        return f"not tried: it could gain {high:.3f} at most"
    if "compile" in change:
        if control["shapes"] > 2 and job.workload.length is None:
            return f"not tried: batches came in {control['shapes']} shapes, each of which would be compiled anew"
        saved_s = job.horizon * control["step_s"] * (1 - 1 / high)
        compiling_s = COMPILING_S.get(job.hardware.device.type, 25.0)
        if saved_s < compiling_s:
            return (
                f"not tried: compiling takes about {compiling_s:.0f} s and would save {saved_s:.0f} s of "
                f"{job.horizon} steps at most; for a longer training say --horizon STEPS"
            )
    return ""


def _frames_saved(job: ClimbState) -> float:
    """Return how many times as many padded frames an epoch has without buckets, by the headers of the files."""
    if job.workload.length is None:
        return 1.0
    lengths = torch.tensor([job.workload.length(item) for item in job.workload.train])
    plain = BatchSampler(len(lengths), job.recipe.batch_size, job.recipe.seed)
    return padded_frames(plain, lengths) / padded_frames(dataclasses.replace(plain, lengths=lengths), lengths)


def _try(job: ClimbState, row: Row, best: Plan, control: Row) -> Row:
    """Measure a candidate against the best plan; return its row, with the verdict."""
    job.say("{stage}, predicted {predicted_low:.2f} to {predicted_high:.2f}".format(**row))
    plans = best, dataclasses.replace(best, **row["fields"])
    if row["compiles"]:
        from torch._inductor.utils import fresh_cache
    with fresh_cache() if row["compiles"] else contextlib.nullcontext():  # what compiling takes is part of the answer
        result = measured(job, plans, ("best so far", row["change"]), row["stage"])
    if isinstance(result, str):
        job.say(f"  {result}")
        return row | {"why": result}
    # Against the best plan, whose batches or bits need not be the naive plan's any more; the noise is of its two seeds.
    other_seed = [
        loss + other - first
        for loss, other, first in zip(result.losses_a, control["other_seed"], control["losses"], strict=True)
    ]
    same = parity(row["promises"], result.losses_b, result.losses_a, other_seed)
    kept = result.faster and same.passed
    why = "faster, and learns the same" if kept else str(same) if result.faster else result.decision
    job.say(f"  {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f}): {'kept' if kept else 'rejected'}, {why}")
    return row | {
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
        "parity": str(same),
        "kept": kept,
        "why": why,
        "step_s_before": result.step_s[0],
        "step_s_after": result.step_s[1],
        "compile_s": max(0.0, result.warmup_s_b - result.warmup_s_a) if row["compiles"] else None,
        "measurement": result.as_measurement(),
    }


def _too_short(job: ClimbState) -> None:
    kept_in = f"; what was measured is kept in {job.out}, and --resume goes on from it" if job.out else ""
    raise UsageError(
        f"a budget of {job.budget_s:.0f} s is too short to try one rung beside the baseline: give it at least "
        f"{math.ceil(1.5 * job.spent_s() / RUNGS_SHARE)} s{kept_in}"
    )
