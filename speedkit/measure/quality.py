"""Is the fast plan as good? Losses of the first steps, scores over seeds, and the time to one score."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speedkit.data.cache_files import PLAIN, content_hash
from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json
from speedkit.hardware import Hardware, cache_root
from speedkit.measure.stats import NonInferiority, non_inferior, pooled_non_inferior, trimmed_mean
from speedkit.plan import Plan
from speedkit.recipe import Recipe, steps_per_epoch, with_batch_size
from speedkit.train.fit import fit
from speedkit.workloads.workload import Workload

LAST = 4  # evaluations, whose mean is a training's quality: one alone scatters more than the plans differ
TAIL = 0.025  # of error: a climb may look twice, after its first seeds and after more
FEW_ITEMS = 200  # to test on: with fewer each training tests on others, and their mean loss is looked at too
ORDER_TAIL = 0.005  # of error: batches of other items may move the mean of the first losses so far
MIN_STEPS = 10  # fewer are no training that a schedule could shape
VERSION = 2  # of what `curve` returns
Row = dict[str, Any]
Curves = dict[str, list[Row]]  # plan -> what `curve` returns, one for each seed


@dataclasses.dataclass(frozen=True)
class Parity:
    """How near the losses of two runs are to what is `promised` of them: their `difference`, and what `noise` makes."""

    promised: str
    difference: float
    noise: float
    passed: bool

    def __str__(self) -> str:
        if self.promised == "bit-equal":
            return "losses bit-equal" if self.passed else f"losses differ by {self.difference:.2g}, should be bit-equal"
        side = "within" if self.passed else "beyond"
        if self.promised == "order-equal":
            return f"mean losses differ by {self.difference:.2g}, {side} the {self.noise:.2g} of other batches"
        return f"losses differ by {self.difference:.2g}, {side} the {self.noise:.2g} of another seed"


def parity(promised: str, losses: Sequence[float], reference: Sequence[float], other_seed: Sequence[float]) -> Parity:
    """Return whether `losses` keep what is `promised` of them against `reference`.

    bit-equal: every loss is the same number. loss-equal: the mean absolute difference is at most that between the
    reference and the same plan from `other_seed`: training cannot feel it. order-equal: the batches are others of the
    same items, so the mean difference is at most what the scatter of the differences makes of it.
    """
    differences = [new - old for new, old in zip(losses, reference, strict=True)]
    difference = statistics.fmean(map(abs, differences))
    if promised == "bit-equal":
        return Parity(promised, difference, 0.0, not any(differences))
    if promised == "order-equal":
        mean, noise = trimmed_mean(differences, ORDER_TAIL)
        return Parity(promised, abs(mean), noise, abs(mean) <= noise)
    noise = statistics.fmean(abs(other - old) for other, old in zip(other_seed, reference, strict=True))
    return Parity(promised, difference, noise, difference <= noise)


def has_folds(workload: Workload) -> bool:
    """Return whether a workload has so few items to test on that its trainings test on different ones, in folds."""
    return workload.metric == "accuracy" and len(workload.test) < FEW_ITEMS


def fold(workload: Workload, number: int) -> Workload:
    """Return `workload` with the test set of a fold: its own in fold 0, else as large a part of its training set.

    Items are taken at equal distances: in a list in the order of classes, from each class alike.
    """
    others = max(1, len(workload.train) // len(workload.test))
    if not has_folds(workload) or number % (others + 1) == 0:
        return workload
    first, train = number % (others + 1) - 1, list(workload.train)
    test = train[first::others]
    del train[first::others]
    return dataclasses.replace(workload, train=[*train, *workload.test], test=test)


def curve(workload: Workload, recipe: Recipe, plan: Plan | None, **options: Any) -> Row:
    """Train once; return its `points` [[seconds, score], ...], `value`, the mean score of the LAST ones, and seconds.

    Preparing counts: data, cache, model. `options` are those of `fit`.
    """
    total = recipe.total_steps(len(workload.train), drop_last=False)
    if total < 2 * LAST * steps_per_epoch(len(workload.train), recipe.batch_size, drop_last=False):
        plan = dataclasses.replace(plan or Plan(), validate_every=max(1, total // (2 * LAST)))
    history = fit(workload, recipe, plan, progress=False, **options)
    points = [[history.prepare_s + point["seconds"], point["value"]] for point in history.evaluations]
    return {
        "seed": recipe.seed,
        "points": points,
        "steps": [point["step"] for point in history.evaluations],
        "value": statistics.fmean(value for _, value in points[-LAST:]),
        "loss": statistics.fmean(point["loss"] for point in history.evaluations[-LAST:]),
        "seconds": points[-1][0],
        "prepare_s": history.prepare_s,
        "peak_memory_bytes": history.peak_memory_bytes,
    }


def quality_of(workload: Workload, curves: Curves) -> Row:
    """Return what the trainings show of the final plan's quality: a `decision`, with the figures behind it.

    "as good" within the workload's margin, "worse", "not decided", or "not tested" where a plan was not trained twice.
    Where items are few, trainings are compared fold by fold, and besides the score the `likelihood` may decide: the
    (geometric) mean probability of the right class, exp(-loss), in which a right answer counts by how sure it was.
    """
    scores = {name: [run["value"] for run in runs] for name, runs in curves.items()}
    row = {"metric": workload.metric, "higher_is_better": workload.higher_is_better, "margin": workload.margin}
    row |= {**scores, "mean_change": None, "lower": None, "upper": None, "likelihood": None}
    row |= {"decision": "not tested", "passed": False, "seeds_needed": None, "items_needed": None}
    if min(map(len, scores.values())) < 2:
        return row
    result, also = _compared(workload, scores), None
    if has_folds(workload):
        also = _compared(workload, {name: [math.exp(-run["loss"]) for run in runs] for name, runs in curves.items()})
    row |= {"mean_change": result.mean_change, "lower": result.lower, "upper": result.upper}
    row["likelihood"] = also and {"mean_change": also.mean_change, "lower": also.lower, "upper": also.upper}
    if result.passed or (also is not None and also.passed and not result.worse):
        return row | {"decision": "as good", "passed": True}
    if result.worse:
        return row | {"decision": "worse"}
    if has_folds(workload):
        tested = len(workload.test) * min(map(len, scores.values()))
        needed = tested * ((result.mean_change - result.lower) / workload.margin) ** 2
        needed = max(tested + 1, math.ceil(needed))
        return row | {"decision": "not decided", "test_items": len(workload.test), "items_needed": needed}
    return row | {"decision": "not decided", "seeds_needed": _seeds_needed(scores, workload.margin)}


def _compared(workload: Workload, values: dict[str, list[float]]) -> NonInferiority:
    """Return the test of the final plan's values against the naive plan's: fold by fold, or of the two pooled."""
    sign = 1 if workload.higher_is_better else -1
    if not has_folds(workload):
        return pooled_non_inferior(values["baseline"], values["final"], workload.margin, sign=sign, tail=TAIL)
    changes = [new - old for new, old in zip(values["final"], values["baseline"], strict=False)]
    return non_inferior(changes, workload.margin, tail=TAIL)


def _seeds_needed(values: dict[str, list[float]], margin: float) -> int:
    """Return for how many seeds of each plan an equal one would be shown to be as good every other time."""
    variance = statistics.fmean(statistics.variance(scores) for scores in values.values())
    return max(2, math.ceil(2 * variance * (1.96 / margin) ** 2) + 1)


class NaiveCurves:
    """The naive plan's trainings of one recipe on this machine, kept in the cache folder for the next climb.

    They depend on model, loss, data, recipe and versions, and on no plan: what they are of is in the file's name.
    """

    def __init__(self, workload: Workload, recipe: Recipe, hardware: Hardware):
        content = vars(workload) | {"recipe": vars(recipe), "device": hardware.name, "torch": torch.__version__}
        content |= {"version": VERSION, "train": plain_facts(workload.train), "test": plain_facts(workload.test)}
        try:
            name = content_hash(content)
        except SpeedkitError:  # a model that cannot be told from others
            name = ""
        self.path = cache_root() / "quality" / f"{name}.json" if name else None
        self.runs: list[Row] = read_json(self.path) if self.path and self.path.exists() else []

    def add(self, runs: list[Row]) -> None:
        """Keep more trainings, whose seeds follow on those that are kept."""
        if self.path and runs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, [*self.runs, *runs])


def plain_facts(items: Sequence[Any]) -> list[Any]:
    """Return what tells items apart: of an object its plain values, for many may share a data set that is large."""
    return [
        {name: value for name, value in vars(item).items() if isinstance(value, PLAIN)}
        if hasattr(item, "__dict__")
        else item
        for item in items
    ]


def payback(epochs: float, baseline_s: float, final_s: float, prepare_s: dict[str, float]) -> Row:
    """Return what the final plan saves in one training of `epochs`, and when it has earned what it takes to prepare.

    `baseline_s` and `final_s` are seconds of training, `prepare_s` what the final plan takes besides the first time, by
    what for. By `pays_back_after_s` it has made as many steps as the naive one; None where the recipe ends before.
    """
    first_s = sum(prepare_s.values())
    after_s = first_s / (1 - final_s / baseline_s) if final_s < baseline_s else math.inf
    return {
        "epochs": epochs,
        "baseline_s": baseline_s,
        "final_s": final_s + first_s,
        "prepare_s": prepare_s,
        "saved_s": baseline_s - final_s - first_s,
        "pays_back_after_s": after_s if after_s <= baseline_s else None,
    }


def seconds_to_quality(workload: Workload, curves: Curves) -> dict[str, list[float]]:
    """Return the seconds that each training took to the naive plan's mean score less the margin; infinite where never.

    In folds, which differ in how hard they are, it is the score of the naive plan's training on the same fold.
    """
    sign = 1 if workload.higher_is_better else -1
    goals = [run["value"] for run in curves["baseline"]]
    if not has_folds(workload):
        goals = [statistics.fmean(goals)] * len(goals)
    return {
        name: [
            next((at for at, value in run["points"] if sign * (value - goal) >= -workload.margin), math.inf)
            for run, goal in zip(runs, goals, strict=False)
        ]
        for name, runs in curves.items()
    }


def time_to_quality(workload: Workload, curves: Curves) -> Row:
    """Return the seconds (median over seeds) both plans take to one score: the naive plan's mean, less the margin.

    By then the climb has built the cache and compiled the model, as after a first training: a very first one pays for
    both besides.
    """
    sign = 1 if workload.higher_is_better else -1
    target = statistics.fmean(run["value"] for run in curves["baseline"]) - sign * workload.margin
    seconds: dict[str, float | None] = {}
    for name, each_s in seconds_to_quality(workload, curves).items():
        reached = statistics.median(each_s)
        seconds[name] = reached if math.isfinite(reached) else None
    baseline_s, final_s = seconds["baseline"], seconds["final"]
    ratio = baseline_s / final_s if baseline_s and final_s else None
    return {"target": target, "baseline_s": baseline_s, "final_s": final_s, "ratio": ratio, "curves": curves}


# ---- larger batches, which are another recipe ----


def choose_batch_size(
    workload: Workload,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    factors: Sequence[int] = (2, 4),
    seeds: int = 3,
    say: Callable[[str], Any] = lambda text: None,
    **options: Any,
) -> tuple[Recipe, list[Row]]:
    """Return the recipe that reaches the quality of `recipe` soonest, and a row for each batch size tried.

    Tried are its batch size, or for "auto" the workload's own, times `factors`, each with the learning rate by
    `with_batch_size`. A larger batch is taken only when its results are not inferior and it is sooner with every one
    of the `seeds`: samples per second decide nothing. `options` are those of `fit`.
    """
    recipe = recipe or workload.recipe
    if recipe.batch_size == "auto":  # type: ignore[comparison-overlap]  # see its setting
        recipe = dataclasses.replace(recipe, batch_size=workload.recipe.batch_size)

    def trained(candidate: Recipe) -> list[Row]:
        """Return a curve for each seed of a recipe."""
        seeded = [dataclasses.replace(candidate, seed=recipe.seed + number) for number in range(seeds)]
        runs = [curve(fold(workload, number), one, plan, **options) for number, one in enumerate(seeded)]
        say(
            f"batch {candidate.batch_size}, learning rate {candidate.learning_rate:.3g}: "
            f"{workload.metric} {statistics.fmean(run['value'] for run in runs):.4f} "
            f"in {statistics.fmean(run['seconds'] for run in runs):.1f} s"
        )
        return runs

    baseline, best, rows = trained(recipe), (1.0, recipe), list[Row]()
    for factor in factors:
        candidate = with_batch_size(recipe, factor * recipe.batch_size)
        if candidate.total_steps(len(workload.train), drop_last=False) < MIN_STEPS:
            continue
        row = judge_batch(workload, {"baseline": baseline, "final": trained(candidate)})
        rows.append({"batch_size": candidate.batch_size, "learning_rate": candidate.learning_rate, **row})
        if row["taken"] and row["ratio"] > best[0]:
            best = row["ratio"], candidate
    return best[1], rows


def judge_batch(workload: Workload, curves: Curves) -> Row:
    """Return the seconds both recipes take to one quality, and whether the other is as good and sooner every time."""
    times, quality = time_to_quality(workload, curves), quality_of(workload, curves)
    each_s = seconds_to_quality(workload, curves)
    sooner = all(new_s < old_s for new_s, old_s in zip(each_s["final"], each_s["baseline"], strict=True))
    why = "sooner with every seed, and as good" if sooner else "not sooner with every seed"
    why = why if quality["passed"] else f"not shown to be as good within {workload.margin:g}; {why}"
    return {**times, "quality": quality, "taken": sooner and quality["passed"] and bool(times["ratio"]), "why": why}
