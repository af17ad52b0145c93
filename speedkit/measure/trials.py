"""The trials of a tuning: each candidate is predicted, measured against the best plan so far, and kept or rejected."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from speedkit.errors import UsageError
from speedkit.measure.candidates import Trial, candidates
from speedkit.measure.optimizations import Optimization, plan_of
from speedkit.measure.quality import mean_difference, same_losses
from speedkit.measure.stages import AGAIN_SHARE, TRYING_SHARE, Row, Tuning
from speedkit.measure.stats import FALSE_KEEP, LOOKS, log_ratios, trimmed_mean
from speedkit.measure.words import ratio_text
from speedkit.plan import Plan

CONTROL_PAIRS = 20
CONTROL_SHARE = 0.05  # of the budget
HIDDEN = ("precision", "channels_last")  # which show nothing of where a GPU waits for launches
BUSY = 1.05  # what two runs of one plan may differ by, and what 80 pairs must be able to tell


def compare_with_itself(job: Tuning) -> Row:
    """Compare the baseline with itself: how busy the machine is, and what another seed makes of the losses."""
    control = job.compare(
        "A/A control",
        {"baseline": Plan(), "baseline again": Plan()},
        recipe_b=dataclasses.replace(job.recipe, seed=job.recipe.seed + 1),
        pairs=min(job.pairs, CONTROL_PAIRS),
        looks=(),
        max_s=CONTROL_SHARE * job.budget_s,
    )
    job.say(f"baseline: {control.step_s[0] * 1e3:.1f} ms per step; against itself {control.ratio:.3f}")
    _, reach = trimmed_mean(log_ratios(control.seconds_a, control.seconds_b), FALSE_KEEP)
    resolution = math.exp(reach * math.sqrt(len(control.seconds_a) / LOOKS[-1]))  # of all pairs that there may be
    if max(control.ratio, 1 / control.ratio, resolution) > BUSY:
        job.say(
            f"steps scatter: a plan compared with itself gives {ratio_text(vars(control))}, "
            f"so a gain of {resolution:.2f} is shown every other time"
        )
    return {"resolution": resolution, "noise": mean_difference(control.losses_b, control.losses_a)}


def try_optimizations(job: Tuning, optimizations: Sequence[Optimization], *, noise: float) -> list[Trial]:
    """Try the most promising candidate until none is left or the time is up; return all, tried or not.

    Joint ones come after all that show by themselves, and what pays in a longer training only after these. Time that
    is left goes once more to those that stayed undecided, and once something is compiled to what that had HIDDEN.
    `noise` is the difference that another seed makes of the losses.
    """

    def promise(trial: Trial) -> tuple[bool, bool, bool, float]:
        return not trial.again, trial.may_pay, not trial.joint, trial.predicted_low * trial.predicted_high

    trials: list[Trial] = []
    while True:
        best = plan_of(trial.fields for trial in trials if trial.kept)
        verdicts = {trial.stage: trial.why for trial in trials}
        proposed = candidates(job, optimizations, best)
        for trial in [*proposed]:
            hidden = best.compile != "off" and trial.optimization in HIDDEN and trial.stage in verdicts
            if hidden or verdicts.get(trial.stage) == "undecided":
                proposed.append(dataclasses.replace(trial, again=True))
        rest = [trial for trial in proposed if trial.stage not in verdicts]
        waiting = [trial for trial in rest if not trial.why and in_time(job, trial)]
        if not waiting:
            break
        first = max(waiting, key=promise)
        trials.append(Trial(**job.once(first.stage, measure, job, first, best, noise=noise)))

    if not trials and not all(trial.why for trial in rest):
        raise UsageError(
            f"a budget of {job.budget_s:.0f} s is too short to try one optimization: give it at least "
            f"{math.ceil(1.5 * job.spent_s() / TRYING_SHARE)} s; --resume goes on from what was measured"
        )
    for trial in rest:
        if not trial.again:
            why = trial.why or "not tried: the time for optimizations is used up"
            trials.append(dataclasses.replace(trial, why=why))
    return trials


def in_time(job: Tuning, trial: Trial) -> bool:
    """Return whether a trial is begun: there is time for it, or it was measured before the tuning was stopped."""
    share = AGAIN_SHARE if trial.again else TRYING_SHARE
    return trial.stage in job.results or job.spent_s() <= share * job.budget_s


def measure(job: Tuning, trial: Trial, best: Plan, *, noise: float) -> Row:
    """Measure a candidate against the best plan; return the fields of the trial, with the verdict."""
    job.say(f"{trial.stage}: predicted {trial.predicted_low:.2f} to {trial.predicted_high:.2f}")
    plans = {"best so far": best, trial.change: dataclasses.replace(best, **trial.fields)}
    with contextlib.ExitStack() as stack:
        if trial.compiles:  # what compiling takes is part of the answer
            from torch._inductor.utils import fresh_cache

            stack.enter_context(fresh_cache())
        result = job.attempt(str(trial.stage), plans)
    if isinstance(result, str):
        job.say(f"  {result}")
        return vars(trial) | {"why": result}

    # Against the best plan, whose batches or bits need not be the baseline's any more.
    agreement = same_losses(trial.promises, result.losses_b, result.losses_a, noise=noise)
    compile_s = pays_from_step = None
    if trial.compiles:
        compile_s = max(0.0, result.warmup_s_b - result.warmup_s_a)
        if result.faster:
            pays_from_step = math.ceil(compile_s / (result.step_s[0] * (1 - 1 / result.ratio)))
    pays = (pays_from_step or 0) <= job.horizon
    kept = result.faster and agreement.passed and pays
    why: str = result.decision
    if kept:
        why = "faster, and learns the same"
    elif result.faster and not agreement.passed:
        why = agreement.words
    elif result.faster:
        why = f"faster, but pays from {pays_from_step:,} steps on; this training has {job.horizon:,}"
    verdict = "kept" if kept else "rejected"
    job.say(f"  {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f}): {verdict}, {why}")
    return vars(trial) | {
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
        "same_losses": agreement.words,
        "step_s_before": result.step_s[0],
        "compile_s": compile_s,
        "pays_from_step": pays_from_step,
        "kept": kept,
        "why": why,
    }
