"""What a change of the plan should gain, from where the time of the best plan goes; and what there is time for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from speedkit.plan import Plan

Change = dict[str, Any]  # plan fields and their new values
Predicted = tuple[float, float]  # least and greatest gain to expect: time before / time after
Parts = tuple[str, ...]  # causes of measure.ledger, of a CPU's ledger and of a GPU's

LOADING, COPYING, LAUNCHING = ("data wait",), ("host-to-device copy",), ("launch-bound",)
COMPUTING, UPDATING = ("forward", "backward", "compute-bound", "bandwidth-bound"), ("optimizer",)

# Field: the parts of a step that it acts on, and how many times as fast they become, at worst and at best. `precision`
# goes by the measured ceilings and `workers` by their number.
EFFECTS: dict[str, tuple[Parts, float, float]] = {
    "cache": (LOADING, 3.0, math.inf),  # what is left is one gather from memory
    "features_on": (LOADING, 0.8, 3.0),
    "shards": (LOADING, 0.9, 1.3),
    "decoder": (LOADING, 0.7, 1.5),
    "prefetch": (COPYING, 1.0, math.inf),
    "bucket": (COMPUTING, 1.0, 1.5),  # padding is no more than a third of most batches
    "fused_optimizer": (UPDATING, 1.0, 4.0),
    "log_every": (("sync-bound",), 1.0, math.inf),
    "micro_batch": (COMPUTING, 0.9, 1.15),  # smaller activations stay in a CPU's cache
    "channels_last": (COMPUTING, 0.95, 1.4),
    "compile": (COMPUTING + LAUNCHING, 0.9, 1.3),
    "compile_scope": (UPDATING, 1.0, 4.0),
    "attention": (COMPUTING, 0.95, 1.1),
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where a step's time goes under the best plan so far, and what the machine could do: a prediction's ground."""

    parts: Mapping[str, float]  # cause of the ledger -> seconds per step
    matmul: Mapping[str, float]  # measured FLOP/s by number format
    on_cpu: bool = True  # whether loading and computing share the same cores
    precision: str = "default"

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    def of(self, parts: Parts) -> float:
        """Return the seconds per step of some parts together."""
        return sum(self.parts.get(part, 0.0) for part in parts)

    def effects(self, change: Change) -> list[tuple[Parts, float, float]]:
        """Return (parts of a step, how many times as fast they become at worst, and at best) for a change."""
        found = [EFFECTS[field] for field in change if field in EFFECTS and change[field]]
        if change.get("workers"):
            # At best workers hide loading behind the computing; on a CPU they take its time from the same cores.
            loading_s = self.of(LOADING)
            hidden_s = 0.0 if self.on_cpu else self.step_s - loading_s
            left_s = max(loading_s / change["workers"] - hidden_s, 1e-9)
            found.append((LOADING, 1.0, max(1.0, loading_s / left_s)))
        if "precision" in change:
            # The measured ceilings bound it: not all of a step is matrix products, and few run at the ceiling. PyTorch
            # by default multiplies matrices in IEEE float32; its convolutions, TF32 on CUDA already, gain less.
            now, new = (
                self.matmul.get("fp32" if name == "default" else name) for name in (self.precision, change["precision"])
            )
            factor = new / now if now and new else 2.0
            found.append((COMPUTING, min(1.0, factor), max(1.0, factor)))
        return found

    def predict(self, change: Change) -> Predicted:
        """Return the least and the greatest gain to expect of a change: Amdahl's law (1967) over its parts."""
        worst_s = best_s = self.step_s
        for parts, at_worst, at_best in self.effects(change):
            worst_s -= self.of(parts) * (1 - 1 / at_worst)
            best_s -= self.of(parts) * (1 - 1 / at_best)
        return self.step_s / worst_s, self.step_s / max(best_s, 0.01 * self.step_s)

    def after(self, change: Change, ratio: float, data_s: float | None = None) -> "Profile":
        """Return the profile with `change` kept, by which a step became `ratio` times as fast.

        What it saved comes off the parts it acts on, as far as they go, and the rest off all alike: as good as another
        ledger where the change does what it is for, and free. `data_s` is what getting a batch takes now, if measured.
        """
        step_s, acted = self.step_s / ratio, {part for parts, *_ in self.effects(change) for part in parts}
        left = max(0.01, 1 - (self.step_s - step_s) / max(self.of(tuple(acted)), 1e-9))
        parts = {part: seconds * (left if part in acted else 1.0) for part, seconds in self.parts.items()}
        fixed = {} if data_s is None else {part: min(data_s, 0.95 * step_s) for part in LOADING}
        scale = (step_s - sum(fixed.values())) / sum(parts[part] for part in parts.keys() - fixed.keys())
        parts = {part: seconds * scale for part, seconds in parts.items()} | fixed
        return dataclasses.replace(self, parts=parts, precision=change.get("precision", self.precision))


def middle(predicted: Predicted) -> float:
    """Return the one gain that a range comes down to: coarse, so that a ledger's noise does not decide on the order."""
    return round(math.sqrt(predicted[0] * predicted[1]), 1)


def affordable_pairs(left_s: float, set_ups_s: list[float], pair_s: float, least: int, most: int) -> int:
    """Return the pairs of windows for the first of the comparisons to come, or 0 where even `least` take too long.

    All share alike in what is left beside their `set_ups_s`; none is left out for the sake of later ones.
    """
    if left_s < set_ups_s[0] + least * pair_s:
        return 0
    return int(min(most, max(least, (left_s - sum(set_ups_s)) / len(set_ups_s) / pair_s)))


def affordable_training(left_s: float, steps: int, step_s: float, evaluations_s: float) -> tuple[int, int]:
    """Return (steps, every how manieth test item) of a training that takes `left_s` where that is too short for all.

    Evaluations, `evaluations_s` on all test items, give way first, down to a third of the time.
    """
    every = max(1, math.ceil(evaluations_s / max(left_s / 3, left_s - steps * step_s, 1e-9)))
    return max(1, min(steps, int((left_s - evaluations_s / every) / step_s))), every


def plan_of(rows: list[dict[str, Any]]) -> Plan:
    """Return plain PyTorch with what the rungs in `rows` change, one after the other."""
    plan = Plan()
    for row in rows:
        plan = dataclasses.replace(plan, **row["fields"])
    return plan


def seconds(value: float) -> str:
    """Return a time in the unit that reads best: `42.1 ms`, `3.2 s`, `12 min`, `1.5 h`."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= 2 * length or (unit == "s" and value >= 1):
            break
    else:
        unit, length = "µs", 1e-6
    return f"{value / length:#.3g}".rstrip(".") + f" {unit}"


def text(change: Change) -> str:
    """Return a change as `field=value, field=value`."""
    return ", ".join(f"{field}={value}" for field, value in change.items()) or "nothing"


def changed(plan: Plan) -> Change:
    """Return the fields in which `plan` differs from plain PyTorch."""
    return {field: value for field, value in vars(plan).items() if value != getattr(Plan(), field)}
