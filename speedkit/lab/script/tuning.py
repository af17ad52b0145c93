"""What a tuning of a script tries and keeps: greedy forward selection, each candidate against what is kept so far."""

import contextlib
import dataclasses
import functools
import math
import random
import sys
import time
from builtins import print  # to which a script may give another meaning
from collections.abc import Callable
from typing import Any

from speedkit.data.own_loader import LOADER_OPTIONS
from speedkit.errors import SpeedkitError
from speedkit.lab.script.bench import Bench
from speedkit.lab.script.feed import Candidate, Feed
from speedkit.lab.script.handover import Handover, NewRun, Over, SwitchFailed, Work
from speedkit.lab.script.words import found
from speedkit.measure.contender import TURN_S
from speedkit.measure.optimizations import Change, text
from speedkit.measure.peaks import peaks
from speedkit.measure.predict import Gain, computing_gains, predict
from speedkit.measure.roofline import OperatorCounter, Operators
from speedkit.measure.stats import LOOKS, WORTH
from speedkit.measure.timeline import DATA, OPTIMIZER
from speedkit.measure.turns import Pairs, measure_pairs
from speedkit.train.compile import COMPILING_S

TRYING_SHARE = 0.7  # of budget and steps: nothing is begun after that
TURNS_SHARE = 0.12  # of what there is, that the turns of a candidate may take
LARGE_SHARE = 0.3  # where it makes much of a difference and is still undecided
FINAL_PAIRS = 40
FINAL_SHARE = 0.2  # of the budget at least
HARD_LIMIT = 1.5  # times the budget: the script is ended there
WARM_UP = 3  # steps, beside those for which a loader has batches ready where the loop waits for them
MEMORY_STEPS = 2
ENOUGH_PAIRS = LOOKS[1]  # to decide by, where a step takes long
IN_TIME = 0.02  # of a step: so long it may wait for a batch that is ready
SLOW_TURN_S = 2.0  # of steps for all that a loader may have ready: a turn is shorter
SAME_SAMPLES = "the loop gets the same samples"  # so that there is nothing to test
LIMITS = {"decision": "undecided", "ratio": None, "low": None, "high": None}
Row = dict[str, Any]


class TooShort(SpeedkitError):
    """A run of the script has too few steps for what was asked."""


@dataclasses.dataclass
class Tuning:
    """A tuning of a script: `rows` are what was tried, `kept` what of it stays, `speedup` what all of that gives."""

    budget_s: float
    most_steps: float = math.inf
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    rows: list[Row] = dataclasses.field(default_factory=list)
    kept: Change = dataclasses.field(default_factory=dict)
    speedup: Row = dataclasses.field(default_factory=lambda: dict(LIMITS))
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.handover = Handover(self.find)
        self.bench = Bench(self.handover, self.in_time)
        self.rng = random.Random(0)
        self.device = "cpu"
        self.step_s = 0.0  # as the script is
        self.shares: dict[str, float] = {}
        self.gains: dict[str, Gain] = {}
        self.own: Change = {"workers": 0, "persistent_workers": False}  # fields that the script sets by itself
        self.waiting: list[Candidate] = []

    # ---- from top to bottom, in a thread of its own ----

    def find(self) -> None:
        """Try what can be tried, best first; then hold all that was kept against the script as it is."""
        try:
            self._know()
            while self.waiting and self._spent() < TRYING_SHARE:
                self._try(self._best())
            if self.kept:
                self._finally()
        except Over:
            self.notes.append("the time or the steps were used up before all was decided")
        except Exception as error:  # the rows that are there are worth more
            if not self.rows:
                raise
            self.notes.append(f"the tuning ended early: {type(error).__name__}: {error}")
        for candidate in self.waiting:
            self.rows.append(self._row(candidate) | {"why": "not tried: time or steps for it are used up"})

    def _know(self) -> None:
        """Find out what can be tried, and what it should give."""
        counter = self._ask(self.bench.count)
        loop = self.bench.loop
        assert loop is not None
        self.device = loop.hardware.device.type
        breakdown = loop.profile.observer.breakdown()
        self.step_s = breakdown.step_s
        self.shares = {row["cause"]: row["share"] for row in breakdown.rows}
        with contextlib.suppress(SpeedkitError):  # no memory to measure peaks in: the table's bounds are wider
            self.gains = self._ask(functools.partial(gains_of, counter, self.bench))
        loader = loop.profile.loader
        self.own |= {field: getattr(loader, option) for field, option in LOADER_OPTIONS.items() if loader is not None}
        for candidate in self._ask(self.bench.candidates):
            high = self._predicted(candidate)[1]
            why = candidate[2]
            if not why and math.log(high) < WORTH:
                why = f"not tried: it could gain {high:.3f} at most"
            if why:
                self.rows.append(self._row(candidate) | {"why": why})
            else:
                self.waiting.append(candidate)

    def _predicted(self, candidate: Candidate) -> Gain:
        fields = candidate[1]
        if "set_to_none" in fields:  # neither are zeros written, nor are they added to
            return 1.0, 1 / (1 - self.shares.get(OPTIMIZER, 0.0) / 2) + 0.05
        return predict(fields, self.shares, gains=self.gains)

    def _best(self) -> Candidate:
        """Take the most promising candidate out of those that wait."""
        best = max(self.waiting, key=lambda candidate: math.prod(self._predicted(candidate)))
        self.waiting.remove(best)
        return best

    def _row(self, candidate: Candidate) -> Row:
        optimization, fields, _ = candidate
        low, high = self._predicted(candidate)
        now = self.own | self.kept
        fields = {field: value for field, value in fields.items() if now.get(field) != value}
        row: Row = {"optimization": optimization, "change": text(fields), "fields": fields}
        row |= {"predicted_low": low, "predicted_high": high, **LIMITS, "pairs": 0, "kept": False, "why": ""}
        return row | {"learns": None, "memory_bytes": None, "compile_s": None, "pays_from_step": None}

    # ---- one candidate ----

    def _try(self, candidate: Candidate) -> None:
        row = self._row(candidate)
        fields = row["fields"]
        if fields.get("workers") and self.kept.get("cache"):
            self.rows.append(row | {"why": "not tried: its samples are in memory, and workers make none"})
            return
        if "compile" in fields and (why := self._why_no_time()):
            self.rows.append(row | {"why": why})
            return
        tell(f"trying {row['change']}, predicted {row['predicted_low']:.2f} to {row['predicted_high']:.2f}")
        try:
            row |= self._measure(fields)
        except Over:
            self.rows.append(row | {"why": "undecided: time or steps were used up"})
            raise
        except Exception as error:  # whatever it is, the script goes on without
            told = str(error) if isinstance(error, (TooShort, SwitchFailed)) else f"{type(error).__name__}: {error}"
            reason = " ".join(told.split())
            row["why"] = reason if isinstance(error, TooShort) else f"it failed: {reason[:300]}"
        if row["kept"]:
            self.kept = {**self.kept, **fields}
        self.rows.append(row)
        result = f"{found(row)}, " if row["ratio"] else ""
        tell(f"  {result}{'kept' if row['kept'] else 'not kept'}: {row['why']}")

    def _why_no_time(self) -> str:
        """Return why there is no time to compile, or "": on a GPU there always is."""
        takes_s = COMPILING_S[self.device]
        spent_s = time.perf_counter() - self.began_s
        if self.device == "cuda" or spent_s + takes_s < TRYING_SHARE * self.budget_s:
            return ""
        budget_s = math.ceil((spent_s + takes_s) / TRYING_SHARE)
        return f"not tried: compiling takes about {takes_s:.0f} s; --budget {budget_s}s has room for it"

    def _measure(self, fields: Change) -> Row:
        """Let the candidate take turns with what is kept; return what this adds to its row."""
        before, after = self.kept, {**self.kept, **fields}
        with contextlib.ExitStack() as stack:
            if "compile" in fields:  # what compiling takes is part of the answer
                from torch._inductor.utils import fresh_cache

                cache = fresh_cache()
                cache.__enter__()
                stack.callback(cache.__exit__, None, None, None)  # of an error it would tell, and keep its files
            compile_s = self._warm_up(before, after)
            pairs = self._compare(before, after, TURNS_SHARE, large_share=LARGE_SHARE)
            row: Row = {**vars(pairs.interval), "decision": pairs.decision, "pairs": len(pairs.seconds_a)}
            row["memory_bytes"] = self._ask(functools.partial(self.bench.memory, after, MEMORY_STEPS))
            if pairs.decision != "faster":
                return row | {"why": pairs.decision}
            row["learns"] = learns = self._learns(fields, after)
        if "compile" in fields:
            row["compile_s"] = compile_s
            row["pays_from_step"] = math.ceil(compile_s / (self.step_s * (1 - 1 / pairs.interval.ratio)))
        row["kept"] = learns.get("passed", False)
        row["why"] = "faster, and learns the same"
        if learns["why"] == SAME_SAMPLES:
            row["why"] = f"faster, and {SAME_SAMPLES}"
        elif not learns["tested"]:
            row["why"] = f"faster, but whether it learns the same was not tested: {learns['why']}"
        elif not row["kept"]:
            row["why"] = f"faster, but learns something else: {learns['why']}"
        elif row.get("pays_from_step", 0) > self.bench.run_steps:
            row["kept"] = False
            row["why"] = (
                f"faster, but pays only after {row['pays_from_step']:,} steps; this run makes {self.bench.run_steps:,}"
            )
        return row

    def _learns(self, fields: Change, plan: Change) -> Row:
        if next(iter(fields)) in Feed.fields:
            return {"tested": False, "passed": True, "why": SAME_SAMPLES}
        try:
            return self._ask(functools.partial(self.bench.learns, plan))
        except TooShort as error:
            return {"tested": False, "why": str(error)}

    def _warm_up(self, before: Change, after: Change) -> float:
        """Make the first steps of both plans; return the seconds that the second one's took beyond later ones."""
        steps = WARM_UP
        if self._waits(before, after):
            steps += self._ready(before, after)
        self._turn(before, steps=steps)
        began_s = time.perf_counter()
        self._turn(after, steps=steps)
        first_s = time.perf_counter() - began_s
        return max(0.0, first_s - self._turn(after, steps=steps))

    def _ready(self, *plans: Change) -> int:
        """Return how many batches a loader may have ready under these plans."""
        return max(2 * int((self.own | plan)["workers"]) for plan in plans)

    def _waits(self, before: Change, after: Change) -> bool:
        """Return whether turns of these plans may wait for batches."""
        changed = {field for field in before.keys() | after.keys() if before.get(field) != after.get(field)}
        return self.shares.get(DATA, 0.0) > IN_TIME or not changed.isdisjoint(Feed.fields)

    def _compare(
        self, before: Change, after: Change, share: float, *, large_share: float = 0.0, **limits: Any
    ) -> Pairs:
        """Return the pairs of turns of two plans, in as much time as shares of the budget and of the steps are."""
        all_s = min(self.budget_s, self.most_steps * self.step_s)
        steps = max(1, self._ready(before, after))
        if steps * self.step_s > SLOW_TURN_S:
            steps = max(1, steps // 2)
        if not self._waits(before, after):  # a stock of batches makes no turn faster: rather more pairs
            fitting = share * all_s / (2 * ENOUGH_PAIRS * self.step_s) - 1  # each turn has a step that is not timed
            steps = max(1, min(steps, int(fitting)))
        if self.device != "cpu":
            steps *= math.ceil(TURN_S / self.step_s / steps)
        options: Row = {"rng": self.rng, "steps": steps, "pairs": LOOKS[-1], "large_max_s": large_share * all_s}
        turns = (functools.partial(self._turn, plan) for plan in (before, after))
        return measure_pairs(*turns, max_s=share * all_s, **options | limits)

    def _finally(self) -> None:
        tell(f"all that was kept, against the script as it is: {text(self.kept)}")
        share = max(FINAL_SHARE, 1 - self._spent())
        pairs = self._compare({}, self.kept, share, pairs=FINAL_PAIRS, looks=(), confirm=False)
        self.speedup = {**vars(pairs.interval), "decision": pairs.decision, "pairs": len(pairs.seconds_a)}

    # ---- the script's thread is asked ----

    def _turn(self, plan: Change, *, steps: int) -> float:
        return self._ask(functools.partial(self.bench.turn, plan, steps))

    def _ask(self, work: Callable[[], Work[Any]]) -> Any:
        """Return what work between steps finds; where the script ends meanwhile, in its next run."""
        for _ in range(2):
            with contextlib.suppress(NewRun):
                return self.handover.ask(work)
        raise TooShort("a run of the script makes too few steps for it")

    def _spent(self) -> float:
        """Return the share of the budget, or of the steps, that was used."""
        return max((time.perf_counter() - self.began_s) / self.budget_s, self.handover.steps / self.most_steps)

    def in_time(self) -> bool:
        """Return whether the script may make another step; the tuning is over where it may not."""
        if self._spent() < HARD_LIMIT and self.handover.steps < self.most_steps:
            return True
        self.handover.interrupt(Over())
        return False


def gains_of(counter: OperatorCounter, bench: Bench) -> Work[dict[str, Gain]]:
    """Return what changes of a plan make of what computes, by a step's operators and the peaks of this machine."""
    yield from ()
    assert bench.loop is not None
    hardware = bench.loop.hardware
    limits = {name: peak.value for name, peak in peaks(hardware).items()}
    if not sum(counter.moved_bytes.values()):
        return {}
    return computing_gains(Operators(counter.flops, counter.moved_bytes), limits, "fp32")


def tell(sentence: str) -> None:
    """Say on stderr what goes on."""
    print(f"speedkit: {sentence}", file=sys.__stderr__, flush=True)  # also while a script is run again, silently
