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

NAME = "climb.json"


@dataclasses.dataclass
class Stages:
    """A long measurement in stages: what is fixed, and the `state`, written after each stage so that it can go on."""

    workload: Any
    recipe: Recipe
    hardware: Hardware
    options: dict[str, Any]  # for compare and begin: device, cache_dir
    pairs: int
    window_s: float
    seeds: int
    budget_s: float
    out: Path | None
    say: Callable[[str], None]
    state: dict[str, Any]  # {"stages": {name: result}, "spent_s": seconds of earlier sessions}
    began_s: float = dataclasses.field(default_factory=time.perf_counter)

    def once(self, stage: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a stage: from the state when it is there, else by running it and noting it down."""
        if stage not in self.state["stages"]:
            self.state["stages"][stage] = finite(run())
            if self.out is not None:
                write_json(self.out / NAME, {**self.state, "spent_s": self.spent_s()})
        return self.state["stages"][stage]

    def spent_s(self) -> float:
        """Seconds of the budget that are gone, those of earlier sessions included."""
        return self.state["spent_s"] + time.perf_counter() - self.began_s

    def compare(self, a: Plan, b: Plan, names: tuple[str, str], pairs: int, **more: Any) -> Comparison:
        """Compare two plans on the workload, within a tenth of the budget."""
        return compare(self.workload, a, b, recipe=self.recipe, names=names, pairs=pairs, window_s=self.window_s,
                       max_s=0.1 * self.budget_s, warm_up_s=4.0, **self.options, **more)  # fmt: skip


def read_state(folder: Path | None, workload: Any, recipe: Recipe) -> dict[str, Any]:
    """Return the state to go on from: that in `folder`, or an empty one.

    Raises UsageError when the one there belongs to another workload, data set or recipe.
    """
    job = finite({"workload": workload.name, "train": len(workload.train), "recipe": dataclasses.asdict(recipe)})
    path = folder / NAME if folder else None
    if path and path.exists():
        state = read_json(path)
        if state.get("job") != job:
            raise UsageError(f"{path} is of another workload, data set or recipe: name another folder with --out")
        return state
    return {"job": job, "stages": {}, "spent_s": 0.0}
