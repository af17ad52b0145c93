"""Checkpoints: all that a run needs to go on as if it had never stopped, whole on disk or not there."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic

NAME = "checkpoint.pt"


def save(run: Any, folder: Path) -> Path:
    """Write the state of `run` to `folder`/checkpoint.pt, atomically."""
    state = {
        "recipe": dataclasses.asdict(run.recipe),
        "workload": run.workload.name,
        "train_items": len(run.workload.train),
        "step": run.step,
        "epoch": run.batches.epoch,
        "position": run.batches.position,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scale": run.scale.state_dict() if run.scale else None,
        "pending": [float(loss) for loss in run.pending],
        "rng": get_random_state(run.device),
        "loss": run.history.loss,
        "log_steps": run.history.log_steps,
        "log_step_s": run.history.log_step_s,
        "evaluations": run.history.evaluations,
        "seconds": run.history.seconds,
        "quarantined": dict(run.history.quarantined),
    }
    path = folder / NAME
    with atomic(path) as temporary:
        torch.save(state, temporary)
    return path


def load(run: Any, folder: Path) -> bool:
    """Put `run` where the checkpoint in `folder` left off; return False where there is none.

    Raises UsageError when the checkpoint is of another workload, recipe or data set: going on would not be the same
    run. Another plan is fine, that is what a plan is.
    """
    path = folder / NAME
    if not path.exists():
        return False
    try:
        state = torch.load(path, map_location=run.device, weights_only=True)
        state["recipe"], state["model"], state["rng"]  # another program's file, otherwise
    except Exception as error:  # torch raises whatever its unpickler does
        raise SpeedkitError(f"{path} cannot be read ({type(error).__name__}): remove it to start over") from error
    for what, mine in (
        ("workload", run.workload.name),
        ("train_items", len(run.workload.train)),
        ("recipe", dataclasses.asdict(run.recipe)),
    ):
        if state[what] != mine:
            raise UsageError(f"{path} belongs to another run: its {what} is {_difference(state[what], mine)}")
    rate = run.optimizer.param_groups[0]["lr"]
    for group in state["optimizer"]["param_groups"]:
        group["fused"] = run.plan.fused_optimizer  # decides, while loading, on which device step counts live
    try:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{path} holds another model than {run.workload.name} makes now") from error
    for group in run.optimizer.param_groups:
        group["lr"] = rate  # the schedule writes into this very tensor
    if run.scale and state["scale"]:
        run.scale.load_state_dict(state["scale"])
    run.step, run.batches.epoch, run.batches.position = state["step"], state["epoch"], state["position"]
    run.pending = list(torch.tensor(state["pending"], device=run.device))
    set_random_state([rng.cpu() for rng in state["rng"]], run.device)
    for name in ("loss", "log_steps", "log_step_s", "evaluations", "seconds", "quarantined"):
        setattr(run.history, name, state[name])
    run.history.resumed_from = run.progress.last_step = run.step
    return True


def get_random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the global random generators that training on `device` draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Set them as `get_random_state` returned them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _difference(theirs: Any, mine: Any) -> str:
    if isinstance(theirs, dict):
        changed = [key for key in mine if theirs.get(key) != mine[key]]
        return "; ".join(f"{key}={theirs.get(key)} there, {mine[key]} here" for key in changed)
    return f"{theirs} there, {mine} here"
