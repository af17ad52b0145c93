"""Is plan B faster than plan A? Both trained for real, taking turns, in one process."""

import dataclasses
import math
import random
import signal
import statistics
from typing import Any

import torch

from speedkit.clock import Stopwatch, compilations, run_until_steady
from speedkit.measure.stats import noise_floor, paired_interval
from speedkit.plan import Effective, Plan
from speedkit.recipe import Recipe
from speedkit.train import precision
from speedkit.train.loop import Run, begin, close, steps

MIN_PAIRS = 6


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a comparison found. `ratio` = time A / time B, above 1 where B is faster; `low`..`high` holds 99 % of it."""

    name: str
    a: str
    b: str
    seconds_a: tuple[float, ...]  # one per window, in the order of the pairs
    seconds_b: tuple[float, ...]
    steps_per_window: int
    ratio: float
    low: float
    high: float
    noise_floor: float  # what comparing a plan with itself could show: a gain below it is none
    warmup_s_a: float  # until steady, compilation included
    warmup_s_b: float
    losses_a: tuple[float, ...]  # of the first steps, from the same seed
    losses_b: tuple[float, ...]
    effective_a: Effective
    effective_b: Effective
    steady: bool  # False when a side had not settled by the end of its warm-up
    compiled_in_windows: int  # graphs compiled while measuring: anything but 0 spoils the windows

    @property
    def faster(self) -> bool:
        """Whether B is faster than A beyond the noise."""
        return self.low > max(1.0, self.noise_floor)

    @property
    def slower(self) -> bool:
        """Whether B is slower than A beyond the noise."""
        return self.high < min(1.0, 1 / self.noise_floor)

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds per step of A and of B: medians over the windows."""
        return (
            statistics.median(self.seconds_a) / self.steps_per_window,
            statistics.median(self.seconds_b) / self.steps_per_window,
        )

    def as_measurement(self) -> dict[str, Any]:
        """Return the row of `measurements` in a record."""
        return {
            "name": self.name, "a": self.a, "b": self.b,
            "seconds_a": list(self.seconds_a), "seconds_b": list(self.seconds_b),
            "steps_per_window": self.steps_per_window,
            "ratio": self.ratio, "low": self.low, "high": self.high, "noise_floor": self.noise_floor,
            "warmup_s_a": self.warmup_s_a, "warmup_s_b": self.warmup_s_b,
            "steady": self.steady, "compiled_in_windows": self.compiled_in_windows,
        }  # fmt: skip

    def __str__(self) -> str:
        verdict = "faster" if self.faster else "slower" if self.slower else "no difference beyond the noise"
        return (
            f"{self.b} against {self.a}: {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}), "
            f"noise floor {self.noise_floor:.3f}: {verdict}"
        )


class Side:
    """One plan in training, able to take a turn and to stand still."""

    def __init__(self, workload: Any, recipe: Recipe, plan: Plan, device: str | torch.device, cache_dir: Any):
        self.run: Run = begin(workload, recipe, plan, device=device, cache_dir=cache_dir, endless=True)
        self.steps = steps(self.run)
        self.stopwatch = Stopwatch(self.run.device)
        self.losses: list[float] = []

    def turn(self) -> None:
        """Get ready to train: set this plan's process-wide switches and let its loader processes work."""
        precision.apply(self.run.plan)
        self.run.batches.signal_workers(signal.SIGCONT)

    def rest(self) -> None:
        """Stop the loader processes where they are, buffers and all, so that they steal no time from the other plan."""
        self.run.batches.signal_workers(signal.SIGSTOP)

    def warm_up(self, loss_steps: int, window_s: float, max_s: float) -> tuple[float, float, bool]:
        """Train until the step time has settled; return (seconds per step, seconds it took, whether it settled).

        The losses of the first `loss_steps` steps are kept for parity. Batches buffered while the loader started up
        are used up on the way: there are at most workers * prefetch_factor of them.
        """
        self.turn()
        stopwatch = Stopwatch(self.run.device)
        stopwatch.start()
        plan = self.run.plan
        for _ in range(max(loss_steps, 2 * int(plan.workers) * plan.prefetch_factor)):
            next(self.steps)
            if len(self.losses) < loss_steps:
                assert self.run.last_loss is not None
                self.losses.append(float(self.run.last_loss))
        seconds = stopwatch.stop()
        steady = run_until_steady(lambda: next(self.steps), self.run.device, window_s=window_s, max_s=max_s)
        self.rest()
        return steady.step_s, seconds + steady.seconds, steady.steady

    def window(self, count: int) -> float:
        """Return the seconds of `count` steps."""
        self.turn()
        self.stopwatch.start()
        for _ in range(count):
            next(self.steps)
        seconds = self.stopwatch.stop()
        self.rest()
        return seconds

    def close(self) -> None:
        """End the run."""
        self.steps.close()
        close(self.run)


def compare(
    workload: Any,
    plan_a: Plan,
    plan_b: Plan,
    *,
    recipe: Recipe | None = None,
    device: str | torch.device = "auto",
    pairs: int = 20,
    window_s: float = 0.25,
    max_s: float | None = None,
    loss_steps: int = 16,
    seed: int = 0,
    name: str = "",
    names: tuple[str, str] = ("a", "b"),
    cache_dir: Any = None,
    workload_b: Any = None,
    recipe_b: Recipe | None = None,
) -> Comparison:
    """Train `workload` under both plans in turns and return how much faster B is.

    Both are warmed up past compilation and autotuning. Then windows of equal numbers of steps alternate in blocks
    A B B A or B A A B, drawn at random, two pairs each: a drift of the machine hits both plans alike. `max_s` lowers
    the number of pairs before the first is measured, never after having looked at one. The two windows of each plan within
    a block are the A/A control that gives the noise floor. `workload_b` and `recipe_b` replace those of side B.
    """
    recipe = recipe or workload.recipe
    sides = []
    try:
        sides.append(Side(workload, recipe, plan_a, device, cache_dir))
        sides.append(Side(workload_b or workload, recipe_b or recipe, plan_b, device, cache_dir))
        a, b = sides
        warm = [side.warm_up(loss_steps, window_s / 2, max_s=60.0) for side in sides]
        count = max(1, math.ceil(window_s / math.sqrt(warm[0][0] * warm[1][0])))
        if max_s is not None:
            pair_s = count * (warm[0][0] + warm[1][0])
            pairs = min(pairs, max(MIN_PAIRS, int(max_s / pair_s)))
        before = compilations()
        seconds, control = _blocks(a, b, max(2, pairs + pairs % 2) // 2, count, random.Random(seed))
        interval = paired_interval(*seconds)
        return Comparison(
            name or f"{names[0]} against {names[1]}", *names, tuple(seconds[0]), tuple(seconds[1]), count,
            interval.ratio, interval.low, interval.high, noise_floor(control),
            warm[0][1], warm[1][1], tuple(a.losses), tuple(b.losses), a.run.effective, b.run.effective,
            steady=warm[0][2] and warm[1][2], compiled_in_windows=compilations() - before,
        )  # fmt: skip
    finally:
        for side in sides:
            side.close()


def _blocks(
    a: Side, b: Side, blocks: int, count: int, rng: random.Random
) -> tuple[tuple[list[float], list[float]], list[tuple[float, float]]]:
    """Return ((seconds of A, seconds of B), both in pairs), and the pairs of same-plan windows."""
    seconds: tuple[list[float], list[float]] = ([], [])
    control = []
    for _ in range(blocks):
        first, second = (a, b) if rng.random() < 0.5 else (b, a)
        times = [side.window(count) for side in (first, second, second, first)]
        outer, inner = (times[0], times[3]), (times[1], times[2])
        seconds[0].extend(outer if first is a else inner)
        seconds[1].extend(inner if first is a else outer)
        # One control pair in the order of time, one against it: a steady drift cancels, as it does in the comparison.
        control += [outer, inner[::-1]] if rng.random() < 0.5 else [outer[::-1], inner]
    return seconds, control
