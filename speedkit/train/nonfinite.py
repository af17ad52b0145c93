"""What happens at log points to steps that are not finite: they are explained and counted, and may be no accident.

`guard.StepGuard` acts in every step; here the host reads the losses, for which it waits anyway.
"""

import math
from typing import Any

import torch

from speedkit.data.batch import tensors_of
from speedkit.errors import SpeedkitError
from speedkit.train.batches import augment
from speedkit.train.run import TrainingRun
from speedkit.workload import Batch

PATIENCE = 5  # bad steps in a row that are no accident
EXPLAINED = 3  # bad steps of a run whose samples are looked at


def read_losses(run: TrainingRun) -> float:
    """Return the mean loss of the good steps since the last log point; the host waits for the device here.

    Raises SpeedkitError for a bad step, or where those are left out when they do not end.
    """
    position = run.position
    losses = run.ranks.sum(torch.stack([loss for loss, _, _ in position.recent])) / run.ranks.count
    step = position.step - len(position.recent)
    good = []
    for loss, (_, epoch, batch) in zip(losses.tolist(), position.recent, strict=True):
        step += 1
        if math.isfinite(loss):
            good.append(loss)
        else:
            note_bad_step(run, loss, {"step": step, "epoch": epoch, "position": batch})
    skipped = run.reporting.history.skipped
    in_row = 0
    while in_row < len(skipped) and skipped[-1 - in_row]["step"] == step - in_row:
        in_row += 1
    if in_row >= PATIENCE:
        first = skipped[-in_row]
        why = f"{in_row} steps in a row are not finite, step {first['step']} first: {explain(run, first)}"
        raise SpeedkitError(f"{why}; mend the data, or lower learning_rate")
    return sum(good) / len(good) if good else math.nan


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
    """Return which samples of the step at `place` {step, epoch, position} are not finite, by its batch made again."""
    if run.ranks.several:
        return "its samples are looked at on one rank only"
    try:
        batch, names = run.data.train.batch_at(place["epoch"], place["position"])
        bad = bad_samples(augment(run, batch, place["step"] - 1), names)  # type: ignore[arg-type]
    except Exception as error:  # a batch that cannot be made again, of samples that are no tensors, no memory for it
        return f"its batch could not be looked at ({error})"
    if bad:
        return f"its batch is not finite for {', '.join(bad[:8])}"
    return "its batch is finite; torch.autograd.set_detect_anomaly(True) shows which operation is not"


def bad_samples(batch: Batch, names: list[str]) -> list[str]:
    """Return which of the samples called `names` are not finite in some tensor [B, ...] of `batch`."""
    finite = torch.ones(len(names), dtype=torch.bool, device=batch.inputs.device)
    for tensor in tensors_of(batch):
        finite &= tensor.reshape(len(tensor), -1).isfinite().all(dim=1)
    return [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
