"""Checkpoints: all that a run needs to go on as if it had never stopped."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedkit.errors import SpeedkitError, UsageError
from speedkit.train.checkpoint_file import NAME, PREVIOUS, read
from speedkit.train.run import TrainingRun

HISTORY = ("loss", "log_steps", "log_step_s", "evaluations", "tested", "seconds", "skipped")


def save(run: TrainingRun) -> None:
    """Begin to write the state of `run`, at a log point, to checkpoint.pt in its `out` folder."""
    learner = run.learner
    step = run.position.step
    model, optimizer = run.ranks.full_state(learner.model, learner.optimizer)
    state: dict[str, Any] = {
        "job": run.job,
        "step": step,
        "epoch": run.data.train.epoch,
        "position": run.data.train.position,
        "model": model,
        "optimizer": optimizer,
        "scaler": learner.precision.scaler.state_dict(),
        "steps_made": learner.steps_made(step),
        "ranks_rng": run.ranks.all_gather(get_random_state(run.device)),
        "history": {name: getattr(run.reporting.history, name) for name in HISTORY},
    }
    if run.reporting.writer is not None:
        run.reporting.writer.save(state)


def load(run: TrainingRun, folder: Path) -> None:
    """Put `run` where the newest whole checkpoint in `folder` left off; leave it as it is where there is none at all.

    Raises UsageError when the checkpoint is of another workload, recipe or data set: going on would not be the same
    run. Another plan is fine, that is what a plan is. Raises SpeedkitError when there are some and none can be read.
    """
    paths = [path for path in (folder / NAME, folder / PREVIOUS) if path.exists()]
    for path in paths:
        try:
            state = read(path)
        except Exception as error:  # torch raises whatever its unpickler does
            run.reporting.progress.say(f"  {path} cannot be read: {error or type(error).__name__}")
            continue
        for key, value in run.job.items():
            before = state["job"].get(key, value)  # an older version may not know the key
            if before != value:
                raise UsageError(f"{path} belongs to another run: {key} is {before} there, {value} here")
        try:
            run.ranks.restore(run.learner.model, run.learner.optimizer, state)
        except RuntimeError as error:
            difference = str(error).splitlines()[-1].strip()
            raise UsageError(f"{path} belongs to another model: {difference}") from error
        restore_place(run, state)
        return
    if paths:
        raise SpeedkitError(f"{paths[0]} cannot be read, nor can one before it: remove it to start over")


def restore_place(run: TrainingRun, state: dict[str, Any]) -> None:
    """Put `run`, but for its weights and optimizer, where it was when `state` was saved."""
    learner = run.learner
    if state["scaler"]:  # else the run that saved it had no float16
        learner.precision.scaler.load_state_dict(state["scaler"])
    learner.guard.good_steps.fill_(state["steps_made"])
    run.position.step = state["step"]
    run.data.train.epoch = state["epoch"]
    run.data.train.position = state["position"]
    random_states = state.get("ranks_rng") or [state["rng"]]  # of an older version, on one rank
    if run.ranks.rank < len(random_states):  # else the run had fewer ranks, and this one draws anew
        set_random_state(random_states[run.ranks.rank], run.device)
    history = run.reporting.history
    vars(history).update(state["history"], resumed_from=state["step"])


def get_random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the global random generators that training on `device` draws from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Set them as `get_random_state` returned them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
