"""What a climb has measured so far, written down stage by stage, so that one that was stopped goes on."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedkit.errors import Interrupted, UsageError
from speedkit.files import finite, read_json, write_json
from speedkit.hardware import Hardware
from speedkit.measure.compare import Comparison, compare
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Workload

NAME, VERSION = "climb.json", 3  # raised when a stage's result becomes another
COMPARISON_SHARE = 0.1  # of the budget, that a comparison's timed turns may take
Row = dict[str, Any]


@dataclasses.dataclass
class ClimbState:
    """What a climb is about, and what it has measured: written after each stage, so that it can go on."""

    workload: Workload
    recipe: Recipe
    hardware: Hardware
    budget_s: float
    horizon: int  # steps of the training that the plan is for
    pairs: int
    seeds: int
    device: str
    cache_dir: str | Path | None
    out: Path | None
    say: Callable[[str], None]
    state: Row  # {"stages": {name: result}, "spent_s": seconds of earlier sessions}
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

    @property
    def options(self) -> Row:
        """Where to train: what `fit`, `compare` and `ledger_of` take."""
        return {"device": self.device, "cache_dir": self.cache_dir}

    @property
    def total_steps(self) -> int:
        """Steps of one training by the recipe."""
        return self.recipe.total_steps(len(self.workload.train), drop_last=False)

    def compare(
        self,
        plans: tuple[Plan, Plan],
        names: tuple[str, str],
        name: str,
        *,
        workload: Workload | None = None,
        **options: Any,
    ) -> Comparison:
        """Compare two plans on the workload, or on a variant of it, within a share of the budget."""
        options = {"pairs": self.pairs, "max_s": COMPARISON_SHARE * self.budget_s, **self.options, **options}
        return compare(workload or self.workload, *plans, recipe=self.recipe, names=names, name=name, **options)


def measured(job: ClimbState, plans: tuple[Plan, Plan], names: tuple[str, str], name: str) -> Comparison | str:
    """Compare two plans; return why where one fails: a model that cannot do this is one more reason not to."""
    try:
        return job.compare(plans, names, name)
    except Interrupted:
        raise
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def read_state(folder: Path | None, workload: Workload, recipe: Recipe) -> Row:
    """Return the state to go on from: that in `folder`, or an empty one.

    Raises UsageError when the one there cannot be read, or is of another version, workload, data set or recipe.
    """
    job = finite({"workload": workload.name, "train": len(workload.train), "recipe": dataclasses.asdict(recipe)})
    path = folder / NAME if folder else None
    if path is None or not path.exists():
        return {"version": VERSION, "job": job, "stages": {}, "spent_s": 0.0}
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
