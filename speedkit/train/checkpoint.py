"""Checkpoints: all that a run needs to go on as if it had never stopped, whole on disk or not there."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic

NAME = "checkpoint.pt"
HISTORY = ("loss", "log_steps", "log_step_s", "evaluations", "seconds", "quarantined")  # what goes on growing


def save(run: Any, folder: Path) -> None:
    """Write the state of `run` to `folder`/checkpoint.pt, atomically."""
    state = {
        "job": _job(run),
        "step": run.step,
        "epoch": run.batches.epoch,
        "position": run.batches.position,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scale": run.scale and vars(run.scale),
        "pending": [float(loss) for loss in run.pending],
        "rng": get_random_state(run.device),
        "history": {name: getattr(run.history, name) for name in HISTORY},
    }
    with atomic(folder / NAME) as temporary:
        torch.save(state, temporary)


def load(run: Any, folder: Path) -> None:
    """Put `run` where the checkpoint in `folder` left off; leave it as it is where there is none.

    Raises UsageError when the checkpoint is of another workload, recipe or data set: going on would not be the same
    run. Another plan is fine, that is what a plan is.
    """
    path = folder / NAME
    if not path.exists():
        return
    try:
        state = torch.load(path, map_location=run.device, weights_only=True)
        job, _, _ = state["job"], state["model"], state["rng"]  # another program's file, otherwise
    except Exception as error:  # torch raises whatever its unpickler does
        raise SpeedkitError(f"{path} cannot be read ({type(error).__name__}): remove it to start over") from error
    changed = [f"{key} is {job.get(key)} there, {mine} here" for key, mine in _job(run).items() if job.get(key) != mine]
    if changed:
        raise UsageError(f"{path} belongs to another run: {'; '.join(changed)}")
    rate = run.optimizer.param_groups[0]["lr"]
    for group in state["optimizer"]["param_groups"]:
        group["fused"] = run.plan.fused_optimizer  # decides, while loading, on which device step counts live
    try:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{path} holds another model than {run.workload.name} makes now") from error
    run.optimizer.param_groups[0]["lr"] = rate  # the schedule writes into this very tensor
    if run.scale and state["scale"]:
        for name, value in state["scale"].items():
            getattr(run.scale, name).copy_(value)
    run.step, run.batches.epoch, run.batches.position = state["step"], state["epoch"], state["position"]
    run.pending = list(torch.tensor(state["pending"], device=run.device))
    set_random_state([rng.cpu() for rng in state["rng"]], run.device)
    vars(run.history).update(state["history"], resumed_from=run.step)


def get_random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the global random generators that training on `device` draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Set them as `get_random_state` returned them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _job(run: Any) -> dict[str, Any]:
    """Return what two runs have in common that are one."""
    return {"workload": run.workload.name, "train_items": len(run.workload.train), **dataclasses.asdict(run.recipe)}
