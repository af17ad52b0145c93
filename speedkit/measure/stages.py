"""A long measurement in stages: each is written down when it is done, and a killed run goes on with the next."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedkit.errors import UsageError
from speedkit.files import finite, read_json, write_json
from speedkit.hardware import Hardware
from speedkit.measure.compare import Comparison, compare
from speedkit.plan import Plan
from speedkit.recipe import Recipe

NAME, VERSION = "climb.json", 2  # raised when a stage's result becomes another


@dataclasses.dataclass
class Stages:
    """A long measurement in stages: what is fixed, and the `state`, written after each stage so that it can go on."""

    workload: Any
    recipe: Recipe
    hardware: Hardware
    options: dict[str, Any]  # for compare, begin and ledger_of: device, cache_dir
    pairs: int  # of windows, the most that a comparison has
    window_s: float
    seeds: int
    budget_s: float
    out: Path | None
    say: Callable[[str], None]
    state: dict[str, Any]  # {"stages": {name: result}, "spent_s": seconds of earlier sessions}
    began_s: float = dataclasses.field(default_factory=time.perf_counter)

    def once(self, stage: str, run: Callable[[], Any]) -> Any:
        """Return the result of a stage: from the state when it is there, else by running it and noting it down."""
        if stage not in self.state["stages"]:
            self.state["stages"][stage] = finite(run())
            if self.out is not None:
                write_json(self.out / NAME, {**self.state, "spent_s": self.spent_s()})
        return self.state["stages"][stage]

    def spent_s(self) -> float:
        """Seconds of the budget that are gone, those of earlier sessions included."""
        return self.state["spent_s"] + time.perf_counter() - self.began_s

    def left_s(self) -> float:
        """Seconds of the budget that are left; below 0 when it is overdrawn."""
        return self.budget_s - self.spent_s()

    def compare(self, a: Plan, b: Plan, names: tuple[str, str], pairs: int, **more: Any) -> Comparison:
        """Compare two plans on the workload, within a tenth of the budget."""
        return compare(
            more.pop("workload", self.workload),
            a,
            b,
            recipe=self.recipe,
            names=names,
            pairs=pairs,
            window_s=self.window_s,
            max_s=0.1 * self.budget_s,
            warm_up_s=4.0,
            **self.options,
            **more,
        )


def read_state(folder: Path | None, workload: Any, recipe: Recipe) -> dict[str, Any]:
    """Return the state to go on from: that in `folder`, or an empty one.

    Raises UsageError when the one there cannot be read, or is of another version, workload, data set or recipe.
    """
    job = finite({"workload": workload.name, "train": len(workload.train), "recipe": dataclasses.asdict(recipe)})
    path = folder / NAME if folder else None
    if path and path.exists():
        try:
            state = read_json(path)
            version = state.get("version")
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} cannot be read ({error}): name another folder with --out") from error
        if version != VERSION:
            raise UsageError(
                f"{path} is of another version of speedkit (format {version}, not {VERSION}): finish it "
                "with that one, or name another folder with --out"
            )
        if state.get("job") != job:
            raise UsageError(f"{path} is of another workload, data set or recipe: name another folder with --out")
        return state
    return {"version": VERSION, "job": job, "stages": {}, "spent_s": 0.0}
