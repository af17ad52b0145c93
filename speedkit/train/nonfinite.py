"""What happens at log points to steps that are not finite: they are explained, counted, and rolled back.

`guard.StepGuard` acts in every step; here the host reads the losses, for which it waits anyway.
"""

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.data.batch import tensors_of
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
    position = run.position
    recovery = run.learner.recovery
    stacked = torch.stack([loss for loss, _, _ in position.recent])
    if run.ranks is not None:
        stacked = run.ranks.sum(stacked) / run.ranks.count
    step = position.step - len(position.recent)
    good = []
    for loss, (_, epoch, batch) in zip(stacked.tolist(), position.recent, strict=True):
        step += 1
        if math.isfinite(loss):
            recovery.bad_in_row = 0
            good.append(loss)
        else:
            recovery.bad_in_row += 1
            note_bad_step(run, loss, {"step": step, "epoch": epoch, "position": batch})
    if recovery.bad_in_row >= PATIENCE:
        roll_back(run)
    elif not recovery.bad_in_row:
        take_snapshot(run)
    return sum(good) / len(good) if good else math.nan


def take_snapshot(run: TrainingRun) -> None:
    """Copy all that training changes, where the recipe asks for it."""
    if run.recipe.on_nonfinite != "recover":
        return
    learner = run.learner
    learner.recovery.snapshot = {}  # freed first: there may be no room for two
    state = {"model": dict(learner.model.state_dict()), "optimizer": learner.optimizer.state_dict()}
    learner.recovery.snapshot = copy.deepcopy(state)
    learner.recovery.snapshot_step = run.position.step


def roll_back(run: TrainingRun) -> None:
    """Make the state that of the snapshot. Raises SpeedkitError where there is none, or it was of no use."""
    learner = run.learner
    recovery = learner.recovery
    history = run.reporting.history
    first = history.skipped[-recovery.bad_in_row]
    why = f"{recovery.bad_in_row} steps in a row are not finite, step {first['step']} first: {explain(run, first)}"
    if not recovery.snapshot:
        raise SpeedkitError(f"{why}; on_nonfinite=recover goes back to good weights and lowers the learning rate")
    if len(history.recoveries) == RECOVERIES:
        raise SpeedkitError(f"{why}, after {RECOVERIES} recoveries: mend the data or lower learning_rate")
    learner.model.load_state_dict(recovery.snapshot["model"])
    restore_optimizer(learner.optimizer, copy.deepcopy(recovery.snapshot["optimizer"]))  # steps change what it gets
    recovery.rate /= 2
    recovery.bad_in_row = 0
    action = f"went back to the state after step {recovery.snapshot_step}, learning rate times {recovery.rate:g}"
    history.recoveries.append({"step": run.position.step, "why": why, "action": action})
    run.reporting.progress.say(f"  step {run.position.step}: {why}; {action}")


def note_bad_step(run: TrainingRun, loss: float, place: dict[str, Any]) -> None:
    """Add the step at `place` {step, epoch, position} to those left out; raise SpeedkitError where none may be."""
    if run.recipe.on_nonfinite == "raise":
        advice = "lower learning_rate, set clip_norm, or leave such steps out with on_nonfinite=skip"
        raise SpeedkitError(f"the loss of step {place['step']} is {loss}: {explain(run, place)}; {advice}")
    skipped = run.reporting.history.skipped
    why = "not looked for"
    if len(skipped) < EXPLAINED:
        why = explain(run, place)
        run.reporting.progress.say(f"  step {place['step']} is left out: {why}")
    skipped.append({**place, "why": why})


def explain(run: TrainingRun, place: dict[str, Any]) -> str:
    """Return where the batch of the step at `place` {step, epoch, position} first is not finite."""
    if run.ranks is not None:
        return "where from is looked for on one rank only"
    gpus = [run.device] if run.device.type == "cuda" else []
    try:
        batch, names = run.data.train.batch_at(place["epoch"], place["position"])
        batch = augment(run, batch, place["step"] - 1)  # type: ignore[arg-type]  # None ends in the `except` below
        bad = bad_samples(batch, names)
        if bad:
            return f"the batch itself is not finite first for {', '.join(bad[:8])}"
        with eager(run.plan), torch.random.fork_rng(gpus):
            where = first_nonfinite(run, batch)
    except Exception as error:  # a loss or a model that cannot be looked into, or no memory for it
        return f"where from could not be found out ({error})"
    return f"{where} is not finite first" if where else "made again, its batch is finite"


def bad_samples(batch: Batch, names: list[str]) -> list[str]:
    """Return which of the samples called `names` are not finite in some tensor [B, ...] of `batch`."""
    finite = torch.ones(len(names), dtype=torch.bool, device=batch.inputs.device)
    for tensor in tensors_of(batch):
        finite &= tensor.reshape(len(tensor), -1).isfinite().all(dim=1)
    return [name for name, good in zip(names, finite.tolist(), strict=True) if not good]


def first_nonfinite(run: TrainingRun, batch: Batch) -> str:
    """Learn from `batch` once more, in a copy of the model; return the first place that is not finite, or ""."""
    model = copy.deepcopy(run.learner.model)
    weights = list(model.named_parameters())
    for name, weight in weights:
        if not is_finite(weight):
            return f"the weights, {name} first"
    places: list[str] = []

    def look_at(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if not is_finite(output):
            places.append(f"the output of {name}")

    for name, module in model.named_modules():
        module.register_forward_hook(functools.partial(look_at, name or type(module).__name__))
    model.zero_grad(set_to_none=True)
    loss, _ = run.workload.loss(model, batch, run.recipe)
    if places:
        return places[0]
    if not is_finite(loss):
        return "the loss"
    loss.backward()
    for name, weight in reversed(weights):
        if not is_finite(weight.grad):
            return f"the gradient of {name}"
    return ""


def is_finite(value: object) -> bool:
    """Return whether all tensors in `value`, of any nesting, are finite."""
    return all(leaf.isfinite().all() for leaf in tree.tree_leaves(value) if isinstance(leaf, Tensor))
