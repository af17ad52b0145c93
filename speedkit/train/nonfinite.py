"""Steps that are not finite: left out on the device, explained and rolled back at log points.

`StepGuard` acts in every step and never makes the host wait; `Recovery` acts at log points, where the host reads the
losses anyway.
"""

import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import augment, eager
from speedkit.train.optimizer import restore_optimizer
from speedkit.workload import Batch

if TYPE_CHECKING:
    from speedkit.train.setup import TrainingRun

PATIENCE = 5  # bad steps in a row that are no accident
RECOVERIES = 3  # of a run; then something is wrong that going back does not cure
EXPLAINED = 3  # bad steps of a run whose cause is looked for


class StepGuard:
    """Keeps a step whose loss or gradient norm is not finite from changing weights, optimizer state or buffers.

    A fused optimizer reads `found_inf` and leaves the step out by itself, so the host never waits; for another one the
    host reads the verdict and drops the gradients. Gradients that overflow float16 while the loss is finite are no bad
    step: GradScaler leaves the step out and lowers the scale.
    """

    def __init__(
        self, recipe: Recipe, plan: Plan, model: nn.Module, *, optimizer: torch.optim.Optimizer, several_ranks: bool
    ):
        device = next(model.parameters()).device
        self.scaled = plan.precision == "fp16"
        self.active = self.scaled or recipe.on_nonfinite != "raise"  # else no step is ever left out
        self.fused, self.optimizer, self.several_ranks = plan.fused_optimizer, optimizer, several_ranks
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), device=device)
        if self.active and self.fused and not self.scaled:  # GradScaler sets its own
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.buffers = list(model.buffers()) if self.active else []
        self.buffers_before = [buffer.clone() for buffer in self.buffers]

    def before_step(self) -> None:
        """Remember what even a bad forward pass changes: BatchNorm's statistics."""
        if self.buffers:
            torch._foreach_copy_(self.buffers_before, self.buffers)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Find out whether the step is finite, by its `loss []` and gradient `norm []`, neither scaled nor clipped.

        Return the loss, NaN where the step is bad.
        """
        bad = loss.isfinite().logical_not().float()
        if self.several_ranks:  # the norm is that of all ranks, the loss of this one
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
        self.found_inf.copy_(torch.where(norm.isfinite(), bad, 1.0))
        if not self.fused and self.found_inf:  # the host waits for the device here
            self.optimizer.zero_grad(set_to_none=True)  # the optimizer finds nothing to do
        return loss if self.scaled else torch.where(self.found_inf == 0, loss, torch.nan)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the step if it was good, else put the buffers back."""
        good = self.found_inf == 0
        self.good_steps += good
        for before, buffer in zip(self.buffers_before, self.buffers, strict=True):
            torch.where(good, buffer, before, out=buffer)


@dataclasses.dataclass
class Recovery:
    """What the host knows of bad steps, and with on_nonfinite=recover a copy of the last good state, on the device.

    Training goes back to it, with half the learning rate, after PATIENCE bad steps in a row.
    """

    bad_in_row: int = 0
    rate: float = 1.0  # times the recipe's learning rate
    snapshot: dict[str, Any] = dataclasses.field(default_factory=dict)
    snapshot_step: int = 0

    def read(self, run: "TrainingRun") -> float:
        """Return the mean loss of the good steps since the last log point; the host waits for the device here.

        Raises SpeedkitError for a bad step, or where those are left out when they do not end.
        """
        stacked = torch.stack([loss for loss, _, _ in run.recent])
        losses = (stacked if run.ranks is None else run.ranks.sum(stacked) / run.ranks.count).tolist()
        first = run.step - len(losses) + 1
        for step, (loss, (_, epoch, position)) in enumerate(zip(losses, run.recent, strict=True), first):
            self.bad_in_row = 0 if math.isfinite(loss) else self.bad_in_row + 1
            if self.bad_in_row:
                note_bad_step(run, loss, {"step": step, "epoch": epoch, "position": position})
        if self.bad_in_row >= PATIENCE:
            self.roll_back(run)
        elif not self.bad_in_row:
            self.take_snapshot(run)
        good = [loss for loss in losses if math.isfinite(loss)]
        return sum(good) / len(good) if good else math.nan

    def take_snapshot(self, run: "TrainingRun") -> None:
        """Copy all that training changes, where the recipe asks for it."""
        if run.recipe.on_nonfinite == "recover":
            self.snapshot = {}  # freed first: there may be no room for two
            state = {"model": dict(run.model.state_dict()), "optimizer": run.optimizer.state_dict()}
            self.snapshot, self.snapshot_step = copy.deepcopy(state), run.step

    def roll_back(self, run: "TrainingRun") -> None:
        """Make the state that of the snapshot. Raises SpeedkitError where there is none, or it was of no use."""
        first = run.history.skipped[-self.bad_in_row]
        why = f"{self.bad_in_row} steps in a row are not finite, step {first['step']} first: {explain(run, first)}"
        if not self.snapshot:
            raise SpeedkitError(f"{why}; on_nonfinite=recover goes back to good weights and lowers the learning rate")
        if len(run.history.recoveries) == RECOVERIES:
            raise SpeedkitError(f"{why}, after {RECOVERIES} recoveries: mend the data or lower learning_rate")
        run.model.load_state_dict(self.snapshot["model"])
        restore_optimizer(run.optimizer, copy.deepcopy(self.snapshot["optimizer"]))  # steps change what it is given
        self.rate /= 2
        self.bad_in_row = 0
        action = f"went back to the state after step {self.snapshot_step}, learning rate times {self.rate:g}"
        run.history.recoveries.append({"step": run.step, "why": why, "action": action})
        run.progress.say(f"  step {run.step}: {why}; {action}")


def note_bad_step(run: "TrainingRun", loss: float, place: dict[str, Any]) -> None:
    """Add the step at `place` {step, epoch, position} to those left out; raise SpeedkitError where none may be."""
    if run.recipe.on_nonfinite == "raise":
        advice = "lower learning_rate, set clip_norm, or leave such steps out with on_nonfinite=skip"
        raise SpeedkitError(f"the loss of step {place['step']} is {loss}: {explain(run, place)}; {advice}")
    why = "not looked for"
    if len(run.history.skipped) < EXPLAINED:
        why = explain(run, place)
        run.progress.say(f"  step {place['step']} is left out: {why}")
    run.history.skipped.append(place | {"why": why})


def explain(run: "TrainingRun", place: dict[str, Any]) -> str:
    """Return where the batch of the step at `place` {step, epoch, position} first is not finite."""
    if run.ranks is not None:
        return "where from is looked for on one rank only"
    try:
        batch, names = run.train_batches.batch_at(place["epoch"], place["position"])
        batch = augment(run, batch, place["step"] - 1)  # type: ignore[arg-type]  # None ends in the `except` below
        finite = torch.stack([tensor.reshape(len(tensor), -1).isfinite().all(1) for tensor in batch]).all(0)  # [B]
        if not finite.all():
            bad = [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
            return f"the batch itself is not finite first for {', '.join(bad[:8])}"
        with eager(run), torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
            where = first_nonfinite(run, batch)
    except Exception as error:  # a loss or a model that cannot be looked into, or no memory for it
        return f"where from could not be found out ({error})"
    return f"{where} is not finite first" if where else "made again, its batch is finite"


def first_nonfinite(run: "TrainingRun", batch: Batch) -> str:
    """Learn from `batch` once more, in a copy of the model; return the first place that is not finite, or ""."""
    model, places = copy.deepcopy(run.model), list[str]()
    weights = list(model.named_parameters())
    places += [f"the weights, {name} first" for name, weight in weights if not weight.isfinite().all()]
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}

    def look(module: nn.Module, _inputs: object, output: object) -> None:
        if not all(leaf.isfinite().all() for leaf in tree.tree_leaves(output) if isinstance(leaf, Tensor)):
            places.append(f"the output of {names[module]}")

    for module in names:
        module.register_forward_hook(look)
    model.zero_grad(set_to_none=True)
    loss, _ = run.workload.loss(model, batch, run.recipe)
    if not loss.isfinite():
        places.append("the loss")
    loss.backward()
    gradients = [(name, weight.grad) for name, weight in reversed(weights) if weight.grad is not None]
    places += [f"the gradient of {name}" for name, gradient in gradients if not gradient.isfinite().all()]
    return places[0] if places else ""
