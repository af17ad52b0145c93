"""The course of one training run, as it is kept."""

import dataclasses
import statistics
from typing import Any

import torch

from speedkit.display import curve, table
from speedkit.fallbacks import EffectivePlan
from speedkit.recipe import Recipe

LOOK = ("step", "set", "metric", "value", "loss")  # of an evaluation, what a table shows


@dataclasses.dataclass
class History:
    """The course of one run. Written as `history.json`; times in seconds, memory in bytes."""

    workload: str
    recipe: Recipe
    effective: EffectivePlan
    device: str
    loss: list[float] = dataclasses.field(default_factory=list)  # mean since the log point before, one per log point
    log_steps: list[int] = dataclasses.field(default_factory=list)
    log_step_s: list[float] = dataclasses.field(default_factory=list)  # seconds per step, one per log point
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of the validation, else the test set
    tested: dict[str, Any] = dataclasses.field(default_factory=dict)  # the last one of the test set
    steps: int = 0  # optimizer steps that changed the weights
    seconds: float = 0.0  # of training, evaluation included, preparation not
    prepare_s: float = 0.0  # data, cache building, model; before the first step
    peak_memory_bytes: int | None = None
    quarantined: dict[str, str] = dataclasses.field(default_factory=dict)  # path -> why
    resumed_from: int | None = None
    skipped: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # bad steps {step, epoch, position, why}
    model: torch.nn.Module | None = None

    def __repr__(self) -> str:
        score = "not tested"
        if self.tested:
            score = "{metric} {value:.4f} of {n} test items".format_map(self.tested)
        return f"<History of {self.workload}: {self.steps} steps in {self.seconds:.3g} s, {score}>"

    def _repr_html_(self) -> str:
        looks = [[look[key] for key in LOOK] for look in self.evaluations]
        below = [f"loss {curve(self.loss)}", *map(str, self.effective.fallbacks)]
        return table(repr(self), LOOK, looks, below="\n".join(below))

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The test set's last evaluation: `{metric, value, n}`."""
        return {key: self.tested[key] for key in ("metric", "value", "n")} if self.tested else None

    @property
    def step_s(self) -> float | None:
        """Seconds per step: the median over log points, so that compilation and evaluation do not count."""
        return statistics.median(self.log_step_s) if self.log_step_s else None

    def as_dict(self) -> dict[str, Any]:
        """Return what `history.json` holds."""
        fields = {name: value for name, value in vars(self).items() if name not in ("effective", "log_step_s", "model")}
        return fields | {
            "recipe": dataclasses.asdict(self.recipe),
            "plan_asked": dataclasses.asdict(self.effective.asked),
            "plan_effective": dataclasses.asdict(self.effective.plan),
            "fallbacks": [dataclasses.asdict(fallback) for fallback in self.effective.fallbacks],
            "evaluation": self.evaluation,
            "step_s": self.step_s,
            "samples_per_s": self.recipe.batch_size / self.step_s if self.step_s else None,
        }
