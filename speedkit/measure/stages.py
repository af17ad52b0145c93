"""The state of a tuning: what is trained, the limits it keeps to, and the result of each stage, saved as it ends."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from speedkit.busy import others, threads_beside, told
from speedkit.errors import Interrupted, SpeedkitError, TooManyBad, UsageError
from speedkit.files import finite
from speedkit.machine import Hardware
from speedkit.measure.apart import compare_apart
from speedkit.measure.breakdown import breakdown_of
from speedkit.measure.checked_file import read_checked, write_checked
from speedkit.measure.compare import Comparison, compare
from speedkit.measure.extras import missing_extra
from speedkit.measure.optimizations import changed, text
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

NAME = "tune.json"
VERSION = 11  # of that file, raised when a stage's result becomes another
TRYING_SHARE = 0.55  # of the budget: no optimization is begun after that
AGAIN_SHARE = 0.4  # of the budget: none is measured a second time after that
COMPARISON_SHARE = 0.1  # of the budget, that a comparison's turns may take
LARGE_SHARE = 1 / 3  # of the budget, where the plans differ much and it is still undecided
Row = dict[str, Any]


class Stage(NamedTuple):
    """A stage of a tuning: its kind, and what it is of."""

    kind: str
    optimization: str = ""
    plan: str = ""  # what it changes of the baseline, or of the best plan so far, in words
    seed: int | None = None
    again: bool = False  # measured a second time, for it was undecided

    def __str__(self) -> str:
        words = [self.kind, self.optimization, self.plan]
        if self.seed is not None:
            words.append(f"seed {self.seed}")
        if self.again:
            words.append("again")
        return ", ".join(filter(None, words))


@dataclasses.dataclass(kw_only=True)
class Tuning:
    """A tuning: what is trained, the limits it keeps to, and its results so far."""

    workload: Workload
    recipe: Recipe
    hardware: Hardware
    budget_s: float
    horizon: int  # steps of the training that the plan is for
    pairs: int
    seeds: int
    options: Row  # device and cache_dir, as `fit`, `compare` and `breakdown_of` take them
    out: Path | None
    say: Callable[[str], None]
    progress: bool | str = "auto"
    others: Callable[[], Mapping[str, float]] = others  # what else uses cores now, by program
    began_s: float = dataclasses.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Go on from what is whole in `out`. Raises UsageError when it is of another version, workload or recipe."""
        about = {
            "version": VERSION,
            "workload": self.workload.name,
            "train": len(self.workload.train),
            "recipe": finite(vars(self.recipe)),
        }
        self.state: Row = {
            "about": about,
            "stages": [],
            "measurements": [],
            "quarantined": {},
            "busy": {},
            "spent_s": 0.0,
        }
        if self.out is not None:
            self.state = read_checked(self.out / NAME, self.say) or self.state
        if self.state["about"] != about:
            what = "another workload, data set, recipe or version of speedkit"
            raise UsageError(f"{self.out} is of {what}: name another folder with --out")
        self.results: dict[Stage, Any] = {}
        for row in self.state["stages"]:
            result = row.pop("result")
            self.results[Stage(**row)] = result

    def once(self, stage: Stage, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a stage: as it was saved, or else of a call of `function`, which is saved."""
        if stage not in self.results:
            self.results[stage] = finite(function(*arguments, **options))
            if self.out is not None:
                stages = [{**stage._asdict(), "result": result} for stage, result in self.results.items()]
                write_checked(self.out / NAME, self.state | {"stages": stages, "spent_s": self.spent_s()})
        return self.results[stage]

    def spent_s(self) -> float:
        """Return the seconds of the budget that are gone, those of earlier sessions included."""
        return self.state["spent_s"] + time.perf_counter() - self.began_s

    @property
    def quarantined(self) -> dict[str, str]:
        """Path -> why of each file that was left out, before the tuning and in it."""
        return dict(self.workload.quarantined) | self.state["quarantined"]

    @functools.cached_property
    def model(self) -> nn.Module:
        """An untrained model, to see what is in it."""
        return self.workload.model()

    def breakdown(self, plan: Plan) -> Row:
        """Return where a step's time goes under `plan`."""

        def measured() -> Row:
            [beside] = self.beside_others(plan)
            breakdown = breakdown_of(self.workload, self.recipe, beside, progress=self.progress, **self.options)
            self.state["quarantined"] |= breakdown.facts.quarantined
            return breakdown.as_dict()

        return self.once(Stage("breakdown", plan=text(changed(plan))), measured)

    def beside_others(self, *plans: Plan) -> list[Plan]:
        """Return `plans` as they are measured: on a CPU that others use too, with no more threads than have a core."""
        seen = self.others() if self.hardware.device.type == "cpu" else {}
        limit = threads_beside(sum(seen.values()), self.hardware.threads)
        if limit == self.hardware.threads:
            return [*plans]
        if not self.state["busy"]:
            self.say(f"this machine is busy: {told(seen)}; while it is, both plans compute with threads={limit}")
        self.state["busy"] |= seen
        return [dataclasses.replace(plan, threads=min(limit, plan.threads or limit)) for plan in plans]

    def compare(self, name: str, plans: Mapping[str, Plan], **options: Any) -> Comparison:
        """Compare two plans by name within a share of the budget, and save what was measured."""
        usual: Row = {
            "pairs": self.pairs,
            "max_s": COMPARISON_SHARE * self.budget_s,
            "large_max_s": LARGE_SHARE * self.budget_s,
            "confirm": False,
            "names": tuple(plans),
        }
        plan_a, plan_b = self.beside_others(*plans.values())
        result = compare(
            self.workload,
            plan_a,
            plan_b,
            recipe=self.recipe,
            name=name,
            progress=self.progress,
            budget=f", {self.budget_s - self.spent_s():.0f} s of the budget left",
            **self.options,
            **(usual | options),
        )
        self.state["measurements"].append(finite(result.as_measurement() | {"threads": plan_a.threads}))
        self.state["quarantined"] |= result.quarantined
        return result

    def compare_apart(self, name: str, plans: Mapping[str, Plan], **limits: Any) -> Row:
        """Compare two plans by name, each in a process of its own, and save what was measured.

        Where the workload cannot be sent to one, they are compared in this process.
        """
        plan_a, plan_b = self.beside_others(*plans.values())
        both = dict(zip(plans, (plan_a, plan_b), strict=True))
        try:
            row = compare_apart(self.workload, both, recipe=self.recipe, name=name, **self.options, **limits)
        except SpeedkitError as error:
            self.say(f"{error}: both plans are measured in this process")
            return self.compare(name, plans, **limits).as_measurement()
        self.state["measurements"].append(finite(row | {"threads": plan_a.threads}))
        return row

    def attempt(self, name: str, plans: Mapping[str, Plan], **options: Any) -> Comparison | str:
        """Compare two plans; return why where one fails: a model that cannot do this is one more reason not to."""
        try:
            return self.compare(name, plans, **options)
        except (Interrupted, TooManyBad):
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            return missing_extra(error) or f"failed: {type(error).__name__}: {first_line}"
