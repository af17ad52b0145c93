"""Is the fast plan as good? Losses of the first steps, scores over seeds, and the time to one score."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from speedkit.data.cache_files import described
from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json
from speedkit.hardware import Hardware, cache_root
from speedkit.measure.stats import NonInferiority, pooled_non_inferior
from speedkit.plan import Plan
from speedkit.recipe import Recipe, steps_per_epoch, with_batch_size
from speedkit.train.fit import fit
from speedkit.workloads.workload import Workload

LAST = 4  # evaluations, whose mean is a training's quality: one alone scatters more than the plans differ
TAIL = 0.025  # of error: a climb may look twice, after its first seeds and after more
MIN_STEPS = 10  # fewer are no training that a schedule could shape
Row = dict[str, Any]
Curves = dict[str, list[Row]]  # plan -> what `curve` returns, one for each seed


@dataclasses.dataclass(frozen=True)
class Parity:
    """How near the losses of two runs are to what is `promised` of them; both numbers are mean |difference|."""

    promised: str
    difference: float
    seed_noise: float
    passed: bool

    def __str__(self) -> str:
        if self.promised == "bit-equal":
            return "losses bit-equal" if self.passed else f"losses differ by {self.difference:.2g}, should be bit-equal"
        side = "within" if self.passed else "beyond"
        losses = "mean losses" if self.promised == "order-equal" else "losses"
        return f"{losses} differ by {self.difference:.2g}, {side} the {self.seed_noise:.2g} of another seed"


def parity(promised: str, losses: Sequence[float], reference: Sequence[float], other_seed: Sequence[float]) -> Parity:
    """Return whether `losses` keep what is `promised` of them against `reference`.

    bit-equal: every loss is the same number. loss-equal: the mean absolute difference is at most that between the
    reference and the same plan from `other_seed`: training cannot feel it. order-equal: the batches are others of the
    same items, so only the means over all steps are compared.
    """
    if promised == "order-equal":
        losses, reference, other_seed = ([statistics.fmean(course)] for course in (losses, reference, other_seed))
    difference, noise = (
        statistics.fmean(abs(x - y) for x, y in zip(course, reference, strict=True)) for course in (losses, other_seed)
    )
    passed = list(losses) == list(reference) if promised == "bit-equal" else difference <= noise
    return Parity(promised, difference, noise, passed)


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
        "seconds": points[-1][0],
        "prepare_s": history.prepare_s,
        "peak_memory_bytes": history.peak_memory_bytes,
    }


def quality_of(workload: Workload, curves: Curves) -> Row:
    """Return what the trainings show of the final plan's quality: a `decision`, with the figures behind it.

    "as good" within the workload's margin, "worse", or "not decided", then with the number of `seeds_needed`; None of
    all where a plan was not trained twice.
    """
    values = {name: [run["value"] for run in runs] for name, runs in curves.items()}
    measured = {"metric": workload.metric, "higher_is_better": workload.higher_is_better, "margin": workload.margin}
    result: NonInferiority | None = None
    if min(map(len, values.values())) > 1:
        sign = 1 if workload.higher_is_better else -1
        result = pooled_non_inferior(values["baseline"], values["final"], workload.margin, sign=sign, tail=TAIL)
    decision = result and ("as good" if result.passed else "worse" if result.worse else "not decided")
    return {
        **measured,
        **values,
        "mean_change": result and result.mean_change,
        "lower": result and result.lower,
        "upper": result and result.upper,
        "passed": decision == "as good",
        "decision": decision or "not tested",
        "seeds_needed": _seeds_needed(values, workload.margin) if decision == "not decided" else None,
    }


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
        try:
            name = described({key: described(value) for key, value in content.items()})
        except SpeedkitError:  # a model that cannot be told from others
            name = ""
        self.path = cache_root() / "quality" / f"{name}.json" if name else None
        self.runs: list[Row] = read_json(self.path) if self.path and self.path.exists() else []

    def add(self, runs: list[Row]) -> None:
        """Keep more trainings, whose seeds follow on those that are kept."""
        if self.path and runs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, [*self.runs, *runs])


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


def seconds_to(target: float, workload: Workload, runs: list[Row]) -> list[float]:
    """Return the seconds that each of `runs` took to reach the score `target`; infinite where it never did."""
    sign = 1 if workload.higher_is_better else -1
    return [next((at for at, value in run["points"] if sign * (value - target) >= 0), math.inf) for run in runs]


def time_to_quality(workload: Workload, curves: Curves) -> Row:
    """Return the seconds (median over seeds) both plans take to one score: the naive plan's mean, less the margin.

    By then the climb has built the cache and compiled the model, as after a first training: a very first one pays for
    both besides.
    """
    sign = 1 if workload.higher_is_better else -1
    target = statistics.fmean(run["value"] for run in curves["baseline"]) - sign * workload.margin
    seconds: dict[str, float | None] = {}
    for name, runs in curves.items():
        reached = statistics.median(seconds_to(target, workload, runs))
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
        seeded = [dataclasses.replace(candidate, seed=recipe.seed + number) for number in range(seeds)]
        runs = [curve(workload, one, plan, **options) for one in seeded]
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
    baseline_s, final_s = (seconds_to(times["target"], workload, curves[side]) for side in ("baseline", "final"))
    sooner = all(new_s < old_s for new_s, old_s in zip(final_s, baseline_s, strict=True))
    why = "sooner with every seed, and as good" if sooner else "not sooner with every seed"
    why = why if quality["passed"] else f"not shown to be as good within {workload.margin:g}; {why}"
    return {**times, "quality": quality, "taken": sooner and quality["passed"] and bool(times["ratio"]), "why": why}
