"""Turns of two plans in pairs: short ones until they show something, then long ones that hold what is rare."""

import dataclasses
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from speedkit.measure.stats import (
    LOOKS,
    WORTH,
    Decision,
    Interval,
    Judgement,
    judge,
    log_ratios,
    share_of,
    total_ratio,
    trimmed_mean,
)
from speedkit.measure.warm_up import compilations

LONG = 25  # steps of a turn that holds what is rare: a loader that stalls, a garbage collection
CONFIRMING = 100  # steps of each plan, in such turns, that confirm what short turns have shown
LONG_LOOKS = (10, 20, 40)  # pairs of such turns after which a comparison may end, where short ones were wrong
SLOW = 3.0  # times the median of its plan's turns: other load on the machine, or a stall of the plan's own
FEW = 5  # turns have no median to speak of
OWN = 0.01  # as unlikely is it that the slow turns of one plan are the machine's
LARGE = math.log(1.2)  # a difference that is worth more time to be decided


Turn = Callable[..., float]  # returns the seconds of so many `steps`


class Pairs(NamedTuple):
    """What pairs of turns have shown: `interval` is the one that decided, for as often as was looked."""

    seconds_a: list[float]
    seconds_b: list[float]
    decision: Decision
    interval: Interval
    slow: tuple[int, int]  # turns of A and of B that took more than SLOW times as long as others
    long_a: list[float]  # seconds of the long turns; none where nothing was to be confirmed
    long_b: list[float]

    @property
    def ratio_total(self) -> float | None:
        """Total time of A over that of B in long turns, in which each step counts alike."""
        return sum(self.long_a) / sum(self.long_b) if self.long_a else None

    def as_measurement(self, name: str, a: str, b: str) -> dict[str, Any]:
        """Return the row of `measurements` in a record, of what was compared by these names."""
        row = {"name": name, "a": a, "b": b, "seconds_a": self.seconds_a, "seconds_b": self.seconds_b}
        return row | vars(self.interval) | {"decision": self.decision}


@dataclasses.dataclass
class Turns:
    """Turns of A and B, of `steps` steps each, in pairs.

    The order within pairs is random, but of every ten pairs A begins five: that the second turn is slower, say, cannot
    pass for a difference. A pair in which something was compiled tells nothing of later steps, and is left out.
    """

    turn_a: Turn
    turn_b: Turn
    rng: random.Random
    steps: int
    on_pair: Callable[["Turns"], object] | None = None  # called after each pair
    a_s: list[float] = dataclasses.field(default_factory=list)
    b_s: list[float] = dataclasses.field(default_factory=list)
    spent_s: float = 0.0
    left_out: int = 0
    orders: list[bool] = dataclasses.field(default_factory=list)  # of the next pairs: whether A begins

    def take(self, most_left_out: int) -> None:
        """Let each take a turn."""
        self.orders = self.orders or self.rng.sample([True, False] * 5, 10)
        before = compilations()
        began_s = time.perf_counter()
        if self.orders.pop():
            a_s = self.turn_a(steps=self.steps)
            b_s = self.turn_b(steps=self.steps)
        else:
            b_s = self.turn_b(steps=self.steps)
            a_s = self.turn_a(steps=self.steps)
        self.spent_s += max(a_s + b_s, time.perf_counter() - began_s)  # a step that is not timed takes time too
        if compilations() > before and self.left_out < most_left_out:
            self.left_out += 1
            return
        self.a_s.append(round(a_s, 9))  # no clock is finer, and records are half as long
        self.b_s.append(round(b_s, 9))
        if self.on_pair is not None:
            self.on_pair(self)

    def kept(self) -> tuple[list[float], list[float]]:
        """Return the seconds of the pairs that count.

        Slow turns that come in proportion to the time of the plans' other turns are the machine's, and their pairs do
        not count. Those beyond it are the plan's own, and all pairs do.
        """
        slow_a = slow_turns(self.a_s)
        slow_b = slow_turns(self.b_s)
        if not any(slow_a + slow_b):
            return self.a_s, self.b_s
        usual_a_s = statistics.median(self.a_s)
        usual_b_s = statistics.median(self.b_s)
        share = usual_a_s / (usual_a_s + usual_b_s)
        count = sum(slow_a) + sum(slow_b)
        chance_a = at_least(sum(slow_a), count, share)
        chance_b = at_least(sum(slow_b), count, 1 - share)
        if min(chance_a, chance_b) < OWN:
            return self.a_s, self.b_s
        usual = [not (a_slow or b_slow) for a_slow, b_slow in zip(slow_a, slow_b, strict=True)]
        return [*itertools.compress(self.a_s, usual)], [*itertools.compress(self.b_s, usual)]

    def measure(
        self,
        judged: Callable[[Sequence[float], Sequence[float]], Judgement],
        *,
        looks: Sequence[int],
        pairs: int,
        max_s: float,
        large_max_s: float = 0.0,
    ) -> None:
        """Take turns until one of `looks` decides, or for `pairs` pairs (two at least), or for `max_s`.

        Pairs that do not count are repeated, as many as `pairs` at most. `large_max_s` is the time for a difference
        that is LARGE.
        """
        while len(self.a_s) < 2 * pairs:
            a_s, b_s = self.kept()
            if len(a_s) in looks and judged(a_s, b_s)[0] != "undecided":
                break
            limit_s = max_s
            if looks and len(a_s) >= 2 and abs(math.log(statistics.median(a_s) / statistics.median(b_s))) > LARGE:
                limit_s = max(max_s, large_max_s)
            if len(a_s) >= 2 and (len(a_s) >= pairs or self.spent_s >= limit_s):
                break
            self.take(pairs)


def slow_turns(seconds: Sequence[float]) -> list[bool]:
    """Return of each of a plan's turns whether it took more than SLOW times their median."""
    if len(seconds) < FEW:
        return [False] * len(seconds)
    limit_s = SLOW * statistics.median(seconds)
    return [turn_s > limit_s for turn_s in seconds]


def at_least(successes: int, tries: int, chance: float) -> float:
    """Return how likely so many successes or more are: the binomial distribution."""
    return sum(math.comb(tries, n) * chance**n * (1 - chance) ** (tries - n) for n in range(successes, tries + 1))


def measure_pairs(
    turn_a: Turn,
    turn_b: Turn,
    *,
    rng: random.Random,
    steps: int = 1,
    pairs: int = LOOKS[-1],
    max_s: float = math.inf,
    large_max_s: float = 0.0,
    looks: Sequence[int] = LOOKS,
    confirm: bool = True,
    long_steps: int = LONG,
    on_pair: Callable[[Turns], object] | None = None,
) -> Pairs:
    """Return the seconds of turns of A and B, `steps` steps each, in pairs, and what they show.

    Stops at a look that decides, after `pairs`, or, with what there is, when turns have taken `max_s`, or
    `large_max_s` where they differ much. Short turns show how typical steps differ, and may miss a cost that is rare:
    with `confirm` CONFIRMING steps of each plan in turns of `long_steps` follow. Where their total time denies what
    short turns have shown, such turns go on and decide.
    `on_pair` is called after each pair of short turns.
    """
    short = Turns(turn_a, turn_b, rng, steps, on_pair)
    judged = functools.partial(_judged_by_typical, looks=looks)
    short.measure(judged, looks=looks, pairs=pairs, max_s=max_s, large_max_s=large_max_s)
    a_s, b_s = short.kept()
    decision, interval = judged(a_s, b_s)

    long = Turns(turn_a, turn_b, rng, steps * math.ceil(long_steps / steps))
    left_s = max(max_s, large_max_s) - short.spent_s
    if confirm and looks and pairs >= looks[0] and left_s > 0:
        long.measure(_judged_by_total, looks=(), pairs=math.ceil(CONFIRMING / long.steps), max_s=left_s)
        if denied(decision, interval, sum(long.a_s) / sum(long.b_s)):
            long.measure(_judged_by_total, looks=LONG_LOOKS, pairs=LONG_LOOKS[-1], max_s=left_s)
            decision, interval = _judged_by_total(*long.kept())
    slow = (sum(slow_turns(short.a_s)), sum(slow_turns(short.b_s)))
    return Pairs(a_s, b_s, decision, interval, slow, *long.kept())


def _judged_by_typical(a_s: Sequence[float], b_s: Sequence[float], *, looks: Sequence[int]) -> Judgement:
    return judge(functools.partial(trimmed_mean, log_ratios(a_s, b_s)), share_of(len(a_s), looks))


def _judged_by_total(a_s: Sequence[float], b_s: Sequence[float]) -> Judgement:
    decision, interval = judge(functools.partial(total_ratio, a_s, b_s), share_of(len(a_s), LONG_LOOKS))
    more = len(a_s) < LONG_LOOKS[-1]
    if decision == "not worth it" and more and sum(b_s) > sum(a_s) * math.exp(WORTH):
        decision = "undecided"  # it is slower, more turns may show
    return decision, interval


def denied(decision: Decision, interval: Interval, total: float) -> bool:
    """Return whether a ratio of total times lies so far beside an interval that it denies the decision made by it."""
    if total < interval.low / math.exp(WORTH):
        return decision in ("faster", "undecided")
    return total > interval.high * math.exp(WORTH) and decision != "faster"
