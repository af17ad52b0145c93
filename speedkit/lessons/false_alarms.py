"""What lesson 01 tries: ways to compare a thing with itself, in made-up drifts and in recorded noise."""

import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from speedkit.files import read_json
from speedkit.lab.provenance import notebooks_folder
from speedkit.measure.stats import LOOKS, decide, log_ratios, trimmed_mean

SIGMA = 0.02  # of the noise of a turn, in logarithms: two per cent
BLOCK = 12  # pairs drawn together, so that noise that lasts for several stays together


def ways(log_times: Sequence[float], rng: random.Random) -> dict[str, bool]:
    """Return for each way whether it sees a difference among twenty turns of the same thing, in the order of time."""
    a, b = log_times[:10], log_times[10:]
    signs = [rng.choice((-1, 1)) for _ in range(10)]
    drawn = [sign * (log_times[2 * n] - log_times[2 * n + 1]) for n, sign in enumerate(signs)]
    mean, reach = trimmed_mean(drawn, 0.005)
    return {
        "best of 3": abs(min(log_times[:3]) - min(log_times[3:6])) > math.log(1.02),
        "A before B": bool(stats.ttest_ind(a, b).pvalue < 0.01),
        "A B A B": bool(stats.ttest_rel(log_times[0::2], log_times[1::2]).pvalue < 0.01),
        "turns": abs(mean) > reach,
    }


def drifts(count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return [count, 20] logarithms of times of the same thing for each kind of drift, noise included."""
    now = np.arange(20)
    worlds = {
        "no drift": np.zeros((count, 20)),
        "steady": rng.uniform(-10, 10, (count, 1)) * SIGMA * now / 20,
        "random walk": rng.normal(0, SIGMA / 2, (count, 20)).cumsum(axis=1),
        "another job": 5 * SIGMA * (now >= rng.integers(0, 20, (count, 1))),
    }
    return {name: world + rng.normal(0, SIGMA, world.shape) for name, world in worlds.items()}


def false_alarms(experiments: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a row for each world, with the share of its experiments in which each way sees a difference."""
    rng, rows = random.Random(0), []
    for world, log_times in experiments.items():
        seen = [ways(row.tolist(), rng) for row in log_times]
        shares = {way: sum(each[way] for each in seen) / len(seen) for way in seen[0]}
        rows.append({"world": world, "trials": len(seen), **shares})
    return rows


@functools.cache
def recorded_noise() -> list[list[float]]:
    """Return the scatter of each comparison that tunings left in the records: log ratios of pairs, less their mean."""

    def noises() -> Iterator[list[float]]:
        for path in sorted((notebooks_folder() / "records").glob("*/90_tune*.json")):
            for row in read_json(path)["measurements"]:
                if len(row["seconds_a"]) >= BLOCK:
                    logs = log_ratios(row["seconds_a"], row["seconds_b"])
                    mean = trimmed_mean(5 * logs, 0.5)[0]  # whatever the number, a fifth of it is left out, no less
                    yield [each - mean for each in logs]

    return list(noises())


def detection(gain: float, trials: int, noises: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return how often the rule of a comparison calls a known gain faster in such noise, and after how many pairs."""
    rng, spent = random.Random(1), 0
    words = dict.fromkeys(("faster", "slower", "not worth it", "undecided"), 0)
    for _ in range(trials):
        noise, drawn = rng.choice(noises), list[float]()
        while len(drawn) < LOOKS[-1]:
            # A block may begin anywhere and goes on at the start, else the ends would be drawn less often and the
            # scatter would have a mean (circular block bootstrap, Politis and Romano 1992).
            start = rng.randrange(len(noise))
            block = [noise[(start + offset) % len(noise)] for offset in range(BLOCK)]
            drawn += [each + math.log1p(gain) for each in block]
        for pairs in LOOKS:
            says = decide(drawn[:pairs])
            if says != "undecided":
                break
        words[says] += 1
        spent += pairs
    return {"gain": gain, **{word: count / trials for word, count in words.items()}, "pairs": spent / trials}
