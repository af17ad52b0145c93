"""Is the fast plan as good? Losses of the first steps, and scores over seeds."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from speedkit.data.cache_files import PLAIN, content_hash
from speedkit.errors import SpeedkitError
from speedkit.machine import Hardware, cache_root
from speedkit.measure.stats import NonInferiority, non_inferior, trimmed_mean, welch_non_inferior
from speedkit.plan import Plan
from speedkit.recipe import Recipe, steps_per_epoch
from speedkit.train.fit import fit
from speedkit.workload import Workload

LOSS_SHARE = 0.02  # of a loss that has no margin: two that differ by less count as equally good
LAST = 4  # evaluations, whose mean is a training's quality: one alone scatters more than the plans differ
ERROR = 0.05  # on each side, over all looks of a tuning at its trainings
FEW_ITEMS = 200  # to test on: with fewer each training tests on others, and their mean loss is looked at too
ORDER_TAIL = 0.005  # of error: batches of other items may move the mean of the first losses so far
VERSION = 5  # of what `curve` returns
Row = dict[str, Any]
Curves = dict[str, list[Row]]  # "baseline" and "final" -> what `curve` returns, one for each seed
Test = Literal["paired", "Welch"]  # by the same seeds, or by the scatter of each plan's trainings


class SameLosses(NamedTuple):
    """Whether the losses of two runs are as near as was promised, and how near, in words."""

    passed: bool
    words: str


def same_losses(promised: str, losses: Sequence[float], reference: Sequence[float], *, noise: float) -> SameLosses:
    """Return whether `losses` keep what is `promised` of them against `reference`.

    bit-equal: every loss is the same number. loss-equal: they differ by no more than `noise`, which is the
    `mean_difference` of the same plan from another seed: training cannot feel it. order-equal: the batches are others
    of the same items, so the mean difference is at most what the scatter of the differences makes of it.
    """
    difference = mean_difference(losses, reference)
    allowed = noise
    if promised == "bit-equal":
        allowed = 0.0
    elif promised == "order-equal":
        changes = [new - old for new, old in zip(losses, reference, strict=True)]
        mean, allowed = trimmed_mean(changes, ORDER_TAIL)
        difference = abs(mean)
    return SameLosses(difference <= allowed, f"losses differ by {difference:.2g}, at most {allowed:.2g} allowed")


def mean_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the mean absolute difference of two runs' losses, step by step."""
    return statistics.fmean(abs(new - old) for new, old in zip(losses, reference, strict=True))


def has_folds(workload: Workload) -> bool:
    """Return whether a workload has so few items to test on that its trainings test on different ones, in folds."""
    return workload.metric == "accuracy" and len(workload.test) < FEW_ITEMS and workload.own_loader is None


def fold(workload: Workload, number: int) -> Workload:
    """Return `workload` with the test set of a fold: its own in fold 0, else as large a part of its training set.

    Items are taken at equal distances: in a list in the order of classes, from each class alike.
    """
    others = max(1, len(workload.train) // len(workload.test))
    number %= others + 1
    if not has_folds(workload) or number == 0:
        return workload
    train = list(workload.train)
    test = train[number - 1 :: others]
    del train[number - 1 :: others]
    return dataclasses.replace(workload, train=[*train, *workload.test], test=test)


def curve(workload: Workload, recipe: Recipe, plan: Plan, **options: Any) -> Row:
    """Train once; return {value, loss, seconds, step_s, evaluation_s, prepare_s, quarantined}.

    `value` and `loss` are means over the LAST evaluations, or with a validation set of the test set at the end.
    `seconds` are those from the start to the last evaluation: `prepare_s` for data, cache and model, `evaluation_s` for
    all evaluations. `step_s` is the mean of the loop's steps without evaluation, after the first log point: compiling
    comes before that. `options` are those of `fit`.
    """
    items = len(workload.train)
    total = recipe.total_steps(items)
    if total < 2 * LAST * steps_per_epoch(items, recipe.batch_size, recipe.drop_last):
        plan = dataclasses.replace(plan, validate_every=max(1, total // (2 * LAST)))
    history = fit(workload, recipe, plan, progress=False, **options)
    looks = history.evaluations[-LAST:]
    if workload.validation:
        looks = [history.tested]
    counts = [after - before for before, after in itertools.pairwise((0, *history.log_steps))]
    laps_s = [count * step_s for count, step_s in zip(counts, history.log_step_s, strict=True)]
    first = min(1, len(counts) - 1)
    return {
        "value": statistics.fmean(look["value"] for look in looks),
        "loss": statistics.fmean(look["loss"] for look in looks),
        "seconds": history.prepare_s + history.evaluations[-1]["seconds"],
        "step_s": sum(laps_s[first:]) / sum(counts[first:]),
        "evaluation_s": history.seconds - sum(laps_s),
        "prepare_s": history.prepare_s,
        "quarantined": history.quarantined,
    }


def quality_of(workload: Workload, curves: Curves, *, test: Test = "paired", tail: float = ERROR) -> Row:
    """Return what the trainings show of the final plan's quality: a `decision`, with the figures behind it.

    "as good" within the workload's margin, "worse", "not decided", or "not tested" where a plan was not trained twice;
    each with an error of `tail`. Where items are few, trainings are compared fold by fold, and the `likelihood` may
    decide where the mean score less its standard error is within the margin, too: the (geometric) mean probability of
    the right class, exp(-loss), in which a right answer counts by how sure it was. Two ways to pass share the error.
    Scores of few items may not scatter at all: where none of N changes, up to -log(error) / N of all others still may.
    """
    margin = margin_of(workload, curves)
    scores = {name: [run["value"] for run in runs] for name, runs in curves.items()}
    unknown = dict.fromkeys(("mean_change", "lower", "likelihood", "seeds_needed", "items_needed"))
    row = {"metric": workload.metric, "margin": margin, "test": test, **scores, **unknown, "decision": "not tested"}
    count = min(map(len, scores.values()))
    if count < 2:
        return row

    folds = has_folds(workload)
    if folds:
        tail /= 2
    sign = 1 if workload.higher_is_better else -1

    def compare(value: Callable[[Row], float]) -> NonInferiority:
        baseline = [value(run) for run in curves["baseline"]]
        final = [value(run) for run in curves["final"]]
        if test == "Welch":
            return welch_non_inferior(baseline, final, margin, tail=tail)
        changes = [new - old for old, new in zip(baseline, final, strict=False)]
        return non_inferior(changes, margin, tail=tail)

    result = compare(lambda run: sign * run["value"])
    row |= {"mean_change": result.mean_change, "lower": result.lower}
    passed = result.passed
    least = -math.log(tail) / margin  # items to test on
    if folds:
        passed = passed and len(workload.test) * count >= least
        likelihood = compare(lambda run: math.exp(-run["loss"]))
        row["likelihood"] = {"mean_change": likelihood.mean_change, "lower": likelihood.lower}
        plausible = result.mean_change - result.error >= -margin and not result.worse
        passed = passed or (likelihood.passed and plausible)
    if passed:
        return row | {"decision": "as good"}
    if result.worse:
        return row | {"decision": "worse"}
    # For how many an equal plan would be shown to be as good every other time: its error falls with their root.
    needed = max(count + 1, math.ceil(count * (1.96 * result.error / margin) ** 2))
    row |= {"decision": "not decided", "seeds_needed": needed}
    if folds:
        items = max(len(workload.test) * needed, math.ceil(least))
        row |= {"test_items": len(workload.test), "items_needed": items}
    return row


def favoured_test(workload: Workload, kept: Curves) -> Test:
    """Return the test with the smaller interval by the trainings that are `kept`; the paired by fewer than three pairs.

    To be asked before others are seen: of two tests of the same trainings, the one that suits passes too often.
    """
    if has_folds(workload) or min(map(len, kept.values())) < 3:
        return "paired"
    baseline, final = ([run["value"] for run in kept[name]] for name in ("baseline", "final"))
    changes = [new - old for old, new in zip(baseline, final, strict=False)]
    paired = non_inferior(changes, 0.0)
    welch = welch_non_inferior(baseline, final, 0.0)
    return "paired" if paired.upper - paired.lower <= welch.upper - welch.lower else "Welch"


def margin_of(workload: Workload, curves: Curves) -> float:
    """Return the workload's margin: where it has none, LOSS_SHARE of the baseline's mean."""
    if workload.margin is not None:
        return workload.margin
    return LOSS_SHARE * abs(statistics.fmean([run["value"] for run in curves["baseline"]] or [0.0]))


def curves_file(workload: Workload, recipe: Recipe, plan: Plan, *, hardware: Hardware) -> Path | None:
    """Return where the trainings of a plan by a recipe on this machine are kept for the next tuning.

    They depend on model, loss, data, recipe, plan and versions: a hash of these is the file's name. None for a model
    that cannot be told from others.
    """
    try:
        content = vars(workload) | {
            side: [_facts(item) for item in getattr(workload, side)] for side in ("train", "test", "validation")
        }
        content |= {"recipe": vars(recipe), "plan": vars(plan), "device": hardware.name}
        content |= {"torch": torch.__version__, "version": VERSION}
        return cache_root() / "quality" / f"{content_hash(content)}.json"
    except SpeedkitError:
        return None


def _facts(item: Any) -> Any:
    """Return the plain values of an object: many may share a data set that is large."""
    values = getattr(item, "__dict__", {}).values()
    return [value for value in values if isinstance(value, PLAIN)] or item
