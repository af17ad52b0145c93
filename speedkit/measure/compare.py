"""Is plan B faster than plan A? Both trained for real, taking turns, in one process."""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from speedkit.clock import Steady, Stopwatch, compilations, run_until_steady
from speedkit.measure.stats import noise_floor, paired_interval
from speedkit.measure.turns import take_turns
from speedkit.plan import EffectivePlan, Plan
from speedkit.recipe import Recipe
from speedkit.train import precision
from speedkit.train.checkpoint import get_random_state, set_random_state
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

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
    noise_floor: float  # 1 or more, what comparing a plan with itself could show: a gain below it is none
    warmup_s_a: float  # until steady, compilation included
    warmup_s_b: float
    losses_a: tuple[float, ...]  # of the first steps, from the same seed
    losses_b: tuple[float, ...]
    effective_a: EffectivePlan
    effective_b: EffectivePlan
    steady: bool  # False when a side had not settled by the end of its warm-up
    compiled_in_windows: int  # graphs compiled while measuring: anything but 0 spoils the windows

    @property
    def faster(self) -> bool:
        """Whether B is faster than A beyond the noise."""
        return self.low > self.noise_floor

    @property
    def slower(self) -> bool:
        """Whether B is slower than A beyond the noise."""
        return self.high < 1 / self.noise_floor

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds per step of A and of B: medians over the windows."""
        a_s, b_s = statistics.median(self.seconds_a), statistics.median(self.seconds_b)
        return a_s / self.steps_per_window, b_s / self.steps_per_window

    def as_measurement(self) -> dict[str, Any]:
        """Return the row of `measurements` in a record: all but the losses and the plans."""
        return {key: value for key, value in vars(self).items() if not key.startswith(("losses_", "effective_"))}

    def __str__(self) -> str:
        verdict = "faster" if self.faster else "slower" if self.slower else "no difference beyond the noise"
        return (
            f"{self.b} against {self.a}: {self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}), "
            f"noise floor {self.noise_floor:.3f}: {verdict}"
        )


class Side:
    """One plan in training, able to take a turn and to stand still."""

    def __init__(self, workload: Any, recipe: Recipe, plan: Plan, device: str | torch.device, cache_dir: Any):
        self.run = setup_run(workload, recipe, plan, device=device, cache_dir=cache_dir, endless=True)
        self.steps = steps(self.run)
        self.stopwatch = Stopwatch(self.run.device)
        self.losses: list[float] = []  # of the first steps
        self.random = get_random_state(self.run.device)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let this plan train: its process-wide switches are set, and only then may its loader processes work.

        Between turns these stand still, buffers and all, so that they steal no time from the other plan. Each side has
        the global random state (dropout's) to itself.
        """
        precision.set_matmul_precision(self.run.plan)
        set_random_state(self.random, self.run.device)
        self.run.train_batches.resume()
        yield
        self.run.train_batches.pause()
        self.random = get_random_state(self.run.device)

    def warm_up(self, loss_steps: int, window_s: float, max_s: float) -> Steady:
        """Train until the step time has settled; return how that went, its seconds those of the whole warm-up.

        The losses of at least the first `loss_steps` steps are kept for parity. Batches buffered while the loader
        started up are used up on the way: there are at most workers * prefetch_factor of them.
        """
        plan, began_s = self.run.plan, time.perf_counter()
        with self.turn():
            for _ in range(max(loss_steps, 2 * int(plan.workers) * plan.prefetch_factor)):
                next(self.steps)
                self.losses.append(float(self.run.last_loss))
            found = run_until_steady(lambda: next(self.steps), self.run.device, window_s=window_s, max_s=max_s)
        return dataclasses.replace(found, seconds=time.perf_counter() - began_s)

    def window(self, count: int) -> float:
        """Return the seconds of `count` steps."""
        with self.turn():
            self.stopwatch.start()
            for _ in range(count):
                next(self.steps)
            return self.stopwatch.stop()

    def close(self) -> None:
        """End the run."""
        self.steps.close()
        self.run.close()


def catch_up(*sides: Side) -> None:
    """Train those that are behind up to the same step: the windows of a pair then hold the same batches.

    Where lengths vary, that is most of what differs from window to window; elsewhere it would be wasted time.
    """
    for side in sides:
        side.window(max(other.run.step for other in sides) - side.run.step)


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
    warm_up_s: float = 20.0,
    loss_steps: int = 16,
    seed: int = 0,
    name: str = "",
    names: tuple[str, str] = ("a", "b"),
    cache_dir: Any = None,
    workload_b: Any = None,
    recipe_b: Recipe | None = None,
) -> Comparison:
    """Train `workload` under both plans in turns and return how much faster B is.

    Both are warmed up past compilation and autotuning; then they take turns at windows of equal numbers of steps.
    `max_s` lowers the number of pairs before the first is measured, never after having looked at one. `workload_b` and
    `recipe_b` replace those of side B.
    """
    recipe = recipe or workload.recipe
    with (
        closing(Side(workload, recipe, plan_a, device, cache_dir)) as a,
        closing(Side(workload_b or workload, recipe_b or recipe, plan_b, device, cache_dir)) as b,
    ):
        warm_a, warm_b = (side.warm_up(loss_steps, window_s / 2, warm_up_s) for side in (a, b))
        if workload.length is not None:
            catch_up(a, b)
        count = max(1, math.ceil(window_s / math.sqrt(warm_a.step_s * warm_b.step_s)))
        if max_s is not None:
            pairs = min(pairs, max(MIN_PAIRS, int(max_s / count / (warm_a.step_s + warm_b.step_s))))
        before = compilations()
        sides = (lambda: a.window(count), lambda: b.window(count))
        seconds_a, seconds_b, control = take_turns(*sides, pairs, random.Random(seed))
        found = paired_interval(seconds_a, seconds_b)
        return Comparison(
            name or f"{names[0]} against {names[1]}",
            *names,
            tuple(seconds_a),
            tuple(seconds_b),
            count,
            **vars(found),
            noise_floor=noise_floor(control),
            warmup_s_a=warm_a.seconds,
            warmup_s_b=warm_b.seconds,
            losses_a=tuple(a.losses[:loss_steps]),
            losses_b=tuple(b.losses[:loss_steps]),
            effective_a=a.run.effective,
            effective_b=b.run.effective,
            steady=warm_a.steady and warm_b.steady,
            compiled_in_windows=compilations() - before,
        )
