"""How tests of quality decide: trainings that records hold, and have held, resampled as those of other tunings.

"chosen" takes the test that three pairs favour, and looks from the fourth on.
"""

import collections
import dataclasses
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import common
import numpy as np

from speedkit.measure.quality import ERROR, Curves, Test, favoured_test, quality_of
from speedkit.measure.trainings import MAX_SEEDS
from speedkit.workload import Workload

ROOT = Path(__file__).parents[1]
RECORDS = "notebooks/records/*/90_*.json"
SEEDS = 3
LOOKS = range(SEEDS, MAX_SEEDS + 1)
SMOOTHING = 0.5  # share of the scatter that is drawn anew: few pairs, resampled as they are, would repeat themselves
WORSE = {"equal": 0.0, "a third of the margin worse": 1 / 3, "a margin worse": 1.0}
Pairs = np.ndarray  # [N, 2] of baseline and final plan: deviations from their means, in margins


def recorded() -> dict[str, Pairs]:
    """Return the pairs of trainings in all records that the repository has had, by workload."""
    log = git("log", "--format=commit %H", "--name-only", "--diff-filter=AM", "--", RECORDS)
    pairs: dict[str, dict[bytes, Pairs]] = collections.defaultdict(dict)  # each training counts once
    commit = ""
    for line in log.splitlines():
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line:
            record = json.loads(git("show", f"{commit}:{line}"))
            quality = {"baseline": [], "final": []} | record.get("quality", {})
            scores = np.array([*zip(quality["baseline"], quality["final"], strict=False)])
            if len(scores) > 1 and np.any(scores[:, 0] != scores[:, 1]):  # equal ones are those of one plan
                pairs[record["parameters"]["workload"]][scores.tobytes()] = deviations(scores, quality["margin"])
    return {name: np.concatenate([*several.values()]) for name, several in pairs.items()}


def git(*words: str) -> str:
    """Return what git prints in the repository."""
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True)


def deviations(scores: Pairs, margin: float) -> Pairs:
    """Return how far scores [N, 2] are from their plan's mean, in margins, as widely as those of other tunings are."""
    return (scores - scores.mean(axis=0)) / margin * np.sqrt(len(scores) / (len(scores) - 1))


def drawn(pairs: Pairs, worse: float, generator: np.random.Generator) -> Curves:
    """Return trainings of a plan that is `worse` by so many margins: pairs drawn again, and a little of their noise."""
    chosen = pairs[generator.integers(len(pairs), size=MAX_SEEDS)]
    noise = generator.multivariate_normal([0, 0], pairs.T @ pairs / len(pairs), size=MAX_SEEDS)
    baseline, final = (np.sqrt(1 - SMOOTHING**2) * chosen + SMOOTHING * noise).T
    scores = {"baseline": baseline, "final": final - worse}
    return {name: [{"value": value} for value in values.tolist()] for name, values in scores.items()}


def decided(workload: Workload, curves: Curves, way: str) -> tuple[str, int]:
    """Return what the looks at trainings decide, and how many of each plan that took."""
    test: Test = "Welch" if way == "Welch" else "paired"
    looks = LOOKS
    if way == "chosen":
        test = favoured_test(workload, {name: runs[:SEEDS] for name, runs in curves.items()})
        looks = LOOKS[1:]
    for count in looks:
        seen = {name: runs[:count] for name, runs in curves.items()}
        decision = quality_of(workload, seen, test=test, tail=ERROR * count / sum(LOOKS))["decision"]
        if decision in ("as good", "worse"):
            return decision, count
    return "not decided", MAX_SEEDS


def measure(quick: bool) -> Iterator[common.Result]:
    """Print what each test makes of each plan; count how often a plan that is a margin worse passes."""
    repeats = 20 if quick else 2000
    workload = dataclasses.replace(common.perceptron(*common.MIDDLE), margin=1.0)  # with test items enough for no folds
    for name, pairs in recorded().items():
        print(f"{name}: {len(pairs)} pairs, correlation {np.corrcoef(pairs.T)[0, 1]:.2f}")
        for (plan, worse), way in itertools.product(WORSE.items(), ("paired", "Welch", "chosen")):
            generator = np.random.default_rng(7)
            results = [decided(workload, drawn(pairs, worse, generator), way) for _ in range(repeats)]
            decisions, counts = zip(*results, strict=True)
            passed = decisions.count("as good") / repeats
            undecided = decisions.count("not decided") / repeats
            print(f"  {plan}, {way}: {passed:.3f} passed, {undecided:.3f} undecided, {np.mean(counts):.1f} trainings")
            if plan == "a margin worse":
                what = f"{name}, {plan}, {way}: passed"
                yield common.median_of(what, [passed], limit=1.1 * ERROR, unit="")


if __name__ == "__main__":
    common.main(measure)
