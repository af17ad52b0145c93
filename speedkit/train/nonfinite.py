"""What happens at log points to steps that are not finite: they are explained, counted, and rolled back.

`guard.StepGuard` acts in every step; here the host reads the losses, for which it waits anyway.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.errors import SpeedkitError
from speedkit.train.batches import augment
from speedkit.train.compile import eager
from speedkit.train.optimizer import restore_optimizer
from speedkit.train.run import TrainingRun
from speedkit.workload import Batch

PATIENCE = 5  # bad steps in a row that are no accident
RECOVERIES = 3  # of a run; then something is wrong that going back does not cure
EXPLAINED = 3  # bad steps of a run whose cause is looked for


def read_losses(run: TrainingRun) -> float:
    """Return the mean loss of the good steps since the last log point; the host waits for the device here.

    Raises SpeedkitError for a bad step, or where those are left out when they do not end.
    """
    recovery = run.recovery
    stacked = torch.stack([loss for loss, _, _ in run.recent])
    losses = (stacked if run.ranks is None else run.ranks.sum(stacked) / run.ranks.count).tolist()
    first = run.step - len(losses) + 1
    for step, (loss, (_, epoch, position)) in enumerate(zip(losses, run.recent, strict=True), first):
        recovery.bad_in_row = 0 if math.isfinite(loss) else recovery.bad_in_row + 1
        if recovery.bad_in_row:
            note_bad_step(run, loss, {"step": step, "epoch": epoch, "position": position})
    if recovery.bad_in_row >= PATIENCE:
        roll_back(run)
    elif not recovery.bad_in_row:
        take_snapshot(run)
    good = [loss for loss in losses if math.isfinite(loss)]
    return sum(good) / len(good) if good else math.nan


def take_snapshot(run: TrainingRun) -> None:
    """Copy all that training changes, where the recipe asks for it."""
    recovery = run.recovery
    if run.recipe.on_nonfinite == "recover":
        recovery.snapshot = {}  # freed first: there may be no room for two
        state = {"model": dict(run.model.state_dict()), "optimizer": run.optimizer.state_dict()}
        recovery.snapshot, recovery.snapshot_step = copy.deepcopy(state), run.step


def roll_back(run: TrainingRun) -> None:
    """Make the state that of the snapshot. Raises SpeedkitError where there is none, or it was of no use."""
    recovery = run.recovery
    first = run.history.skipped[-recovery.bad_in_row]
    why = f"{recovery.bad_in_row} steps in a row are not finite, step {first['step']} first: {explain(run, first)}"
    if not recovery.snapshot:
        raise SpeedkitError(f"{why}; on_nonfinite=recover goes back to good weights and lowers the learning rate")
    if len(run.history.recoveries) == RECOVERIES:
        raise SpeedkitError(f"{why}, after {RECOVERIES} recoveries: mend the data or lower learning_rate")
    run.model.load_state_dict(recovery.snapshot["model"])
    restore_optimizer(run.optimizer, copy.deepcopy(recovery.snapshot["optimizer"]))  # steps change what it is given
    recovery.rate /= 2
    recovery.bad_in_row = 0
    action = f"went back to the state after step {recovery.snapshot_step}, learning rate times {recovery.rate:g}"
    run.history.recoveries.append({"step": run.step, "why": why, "action": action})
    run.progress.say(f"  step {run.step}: {why}; {action}")


def note_bad_step(run: TrainingRun, loss: float, place: dict[str, Any]) -> None:
    """Add the step at `place` {step, epoch, position} to those left out; raise SpeedkitError where none may be."""
    if run.recipe.on_nonfinite == "raise":
        advice = "lower learning_rate, set clip_norm, or leave such steps out with on_nonfinite=skip"
        raise SpeedkitError(f"the loss of step {place['step']} is {loss}: {explain(run, place)}; {advice}")
    why = "not looked for"
    if len(run.history.skipped) < EXPLAINED:
        why = explain(run, place)
        run.progress.say(f"  step {place['step']} is left out: {why}")
    run.history.skipped.append(place | {"why": why})


def explain(run: TrainingRun, place: dict[str, Any]) -> str:
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
        with eager(run.plan), torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
            where = first_nonfinite(run, batch)
    except Exception as error:  # a loss or a model that cannot be looked into, or no memory for it
        return f"where from could not be found out ({error})"
    return f"{where} is not finite first" if where else "made again, its batch is finite"


def first_nonfinite(run: TrainingRun, batch: Batch) -> str:
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
