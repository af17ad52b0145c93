"""Is plan B faster than plan A? Both trained for real, in turns on the same batches, in one process."""

import dataclasses
import functools
import math
import random
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from speedkit import display
from speedkit.clock import timed
from speedkit.errors import SO_FAR, Interrupted, stop_in_words
from speedkit.fallbacks import EffectivePlan
from speedkit.measure.contender import Contender, warm_up
from speedkit.measure.process import process_kept
from speedkit.measure.stats import LOOKS, Decision, paired_interval
from speedkit.measure.turns import LONG, Pairs, Turns, measure_pairs
from speedkit.measure.words import is_boundless
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.progress import bar_of
from speedkit.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison showed in this run: `ratio` = time A / time B, above 1 where B is faster, and its interval.

    `low` and `high` are the ends by which it was decided: 99 %, and more where it was looked at often. `seconds_a` and
    `seconds_b` are those of each pair's turns of `steps_per_turn` steps. Where clips vary in length they are scaled to
    the padded frames that a turn has on average: they tell of the plan, not of the clips.
    """

    name: str
    a: str
    b: str
    seconds_a: list[float]
    seconds_b: list[float]
    steps_per_turn: int
    ratio: float
    low: float
    high: float
    decision: Decision
    ratio_total: float | None  # of all time in the long turns that confirm, in which what is rare counts too
    long_seconds_a: list[float]
    long_seconds_b: list[float]
    slow_turns: tuple[int, int]  # of A and of B: of other load on the machine, or stalls
    warmup_s_a: float  # of the first turns, compilation included
    warmup_s_b: float
    losses_a: list[float]  # of the first steps, from the same seed
    losses_b: list[float]
    effective_a: EffectivePlan
    effective_b: EffectivePlan
    quarantined: dict[str, str]  # path -> why of each file that could not be read

    @property
    def faster(self) -> bool:
        """Whether B is shown to be faster than A."""
        return self.decision == "faster"

    @property
    def slower(self) -> bool:
        """Whether B is shown to be slower than A."""
        return self.decision == "slower"

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds per step of A and of B: medians over the turns."""
        a_s = statistics.median(self.seconds_a)
        b_s = statistics.median(self.seconds_b)
        return a_s / self.steps_per_turn, b_s / self.steps_per_turn

    def as_measurement(self) -> dict[str, Any]:
        """Return the row of `measurements` in a record: what is drawn, and what redoes the statistics."""
        left_out = ("losses_", "effective_", "warmup_", "quarantined")
        return {key: value for key, value in vars(self).items() if not key.startswith(left_out)}

    def __repr__(self) -> str:
        ratio = f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"
        if is_boundless(vars(self)):
            ratio = "not settled"
        total = ""
        if self.ratio_total is not None:
            total = f", {self.ratio_total:.3f} by total time"
        pairs = len(self.seconds_a)
        return f"{self.b} against {self.a}: {ratio} in {pairs} pairs of this run{total}: {self.decision}"

    def _repr_html_(self) -> str:
        return pair_table(repr(self), vars(self))


def pair_table(title: str, row: Mapping[str, Any]) -> str:
    """Return a row of `measurements` in HTML: the steps of A and B as bars, that of B with its interval."""
    longest = max(1.0, 1 / row["low"])
    bar_a = display.bar(1 / longest)
    bar_b = display.bar(1 / row["high"] / longest, 1 / row["low"] / longest)
    return display.table(title, ("plan", "time of a step"), [(row["a"], bar_a), (row["b"], bar_b)])


@stop_in_words()
def compare(
    workload: Workload,
    plan_a: Plan,
    plan_b: Plan,
    *,
    recipe: Recipe | None = None,
    device: str | torch.device = "auto",
    pairs: int = LOOKS[-1],
    max_s: float = math.inf,
    large_max_s: float = 0.0,
    looks: Sequence[int] = LOOKS,
    confirm: bool = True,
    loss_steps: int = 16,
    seed: int = 0,
    name: str = "",
    names: tuple[str, str] = ("a", "b"),
    cache_dir: str | Path | None = None,
    workload_b: Workload | None = None,
    recipe_b: Recipe | None = None,
    progress: bool | str = "auto",
    budget: str = "",
) -> Comparison:
    """Train `workload` under both plans in turns on the same batches and return how much faster B is.

    Ends at the first of `looks` that decides, after `pairs` pairs, or when the turns have taken `max_s`; where
    they differ much, `large_max_s`. With `confirm` 100 steps of each plan follow, in long turns: a cost that is rare
    shows there, and has the last word. `seed` is that of the order within pairs. `workload_b` and `recipe_b` replace
    those of plan B. Random states and switches of the process are afterwards as they were. `progress` is a bar, and
    `budget` what it says of one. Ctrl-C raises Interrupted, whose `so_far` are the pairs so far, undecided.
    """
    recipe = recipe or workload.recipe
    options: dict[str, Any] = {"loss_steps": loss_steps, "device": device, "cache_dir": cache_dir}
    label = f"{names[1]} against {names[0]}"
    measure = functools.partial(
        measure_pairs, pairs=pairs, max_s=max_s, large_max_s=large_max_s, looks=looks, confirm=confirm
    )
    with (
        process_kept(device),
        closing(Contender(workload, recipe, plan_a, **options)) as a,
        closing(Contender(workload_b or workload, recipe_b or recipe, plan_b, **options)) as b,
        bar_of("pair", f"{label}{budget}", pairs, show=progress) as bar,
    ):
        steps = warm_up(a, b)
        measure = functools.partial(measure, rng=random.Random(seed), steps=steps)
        concluded = functools.partial(conclude, a, b, name=name or label, names=names, steps=steps)
        return take_turns(a, b, measure, concluded=concluded, loss_steps=loss_steps, bar=bar)


def take_turns(
    a: Contender,
    b: Contender,
    measure: Callable[..., Pairs],
    *,
    concluded: Callable[[Pairs], Comparison],
    loss_steps: int,
    bar: tqdm,
) -> Comparison:
    """Return what is `concluded` from the pairs that `measure` takes. Ctrl-C raises Interrupted with those so far."""
    latest: list[Turns] = []

    def seen(turns: Turns) -> None:
        latest[:] = [turns]
        ratio = statistics.median(turns.a_s) / statistics.median(turns.b_s)
        bar.set_postfix_str(f"ratio so far {ratio:.3f}", refresh=False)
        bar.update(len(turns.kept()[0]) - bar.n)

    try:
        long_steps = min(LONG, len(a.run.data.train))  # an epoch, where that is shorter
        measured = measure(a.turn, b.turn, long_steps=long_steps, on_pair=seen)
        for side in (a, b):  # losses may have to be compared over more steps than it takes to show a large gain
            side.turn(max(0, loss_steps - len(side.losses)))
    except KeyboardInterrupt:
        if not latest or len(latest[0].a_s) < 2:
            raise
        so_far = concluded(undecided(latest[0]))
        raise Interrupted(f"stopped by SIGINT: {so_far}; {SO_FAR}", signal.SIGINT, so_far) from None
    return concluded(measured)


def undecided(turns: Turns) -> Pairs:
    """Return the pairs so far as a comparison that was stopped."""
    return Pairs(turns.a_s, turns.b_s, "undecided", paired_interval(turns.a_s, turns.b_s), (0, 0), [], [])


def conclude(
    a: Contender, b: Contender, measured: Pairs, *, name: str, names: tuple[str, str], steps: int
) -> Comparison:
    """Return the comparison of A and B by `measured` pairs, of turns of `steps` steps."""
    return Comparison(
        **measured.as_measurement(name, *names),
        steps_per_turn=steps,
        ratio_total=measured.ratio_total,
        long_seconds_a=measured.long_a,
        long_seconds_b=measured.long_b,
        slow_turns=measured.slow,
        warmup_s_a=a.warmup_s,
        warmup_s_b=b.warmup_s,
        losses_a=[float(loss) for loss in a.losses],
        losses_b=[float(loss) for loss in b.losses],
        effective_a=a.run.effective,
        effective_b=b.run.effective,
        quarantined=a.run.data.bad | b.run.data.bad,
    )


def compare_functions(
    name: str,
    functions: Mapping[str, Callable[[], Any]],
    pairs: int,
    *,
    device: torch.device | str = "cpu",
    before: Callable[[], Any] | None = None,
    looks: Sequence[int] = LOOKS,
) -> dict[str, Any]:
    """Return the row of `measurements` for two named functions that take turns, each call a turn.

    Each is called once to warm up. `before` is called before every turn, outside its time. Ends at the first of
    `looks` that decides, or after `pairs` pairs.
    """

    def turn(function: Callable[[], Any], steps: int) -> float:  # of one step: none are confirmed by longer turns
        if before is not None:
            before()
        return timed(function, device, repeats=steps, warmup=0)[0]

    for function in functions.values():
        function()
    a, b = functions
    measured = measure_pairs(
        functools.partial(turn, functions[a]),
        functools.partial(turn, functions[b]),
        pairs=pairs,
        rng=random.Random(0),
        looks=looks,
        confirm=False,
    )
    return measured.as_measurement(name, a, b)
