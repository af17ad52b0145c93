"""Checkpoints: all that a run needs to go on as if it had never stopped, whole on disk or not there."""

import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils import _pytree as tree

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic
from speedkit.train.nonfinite import get_random_state, set_random_state
from speedkit.train.optimizer import restore_optimizer

if TYPE_CHECKING:
    from speedkit.train.run import TrainingRun

NAME, PREVIOUS = "checkpoint.pt", "checkpoint-1.pt"
DIGEST_BYTES = 8  # at the end of the file, which readers of zip archives pass over: xxh3 of all before
OPTIMIZER_STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}  # one tensor per weight each
HISTORY = ("loss", "log_steps", "log_step_s", "evaluations", "seconds", "quarantined", "skipped", "recoveries")
RECOVERY = ("bad_in_row", "rate", "snapshot", "snapshot_step")


class CheckpointWriter:
    """Writes the checkpoints of one run in the background: the run waits while its state is copied, and no longer.

    The copy goes into buffers that are made once: the system hands memory out page by page, which costs far more than
    copying. A thread then writes them, with a checksum that is verified when they are read. On few cores that thread
    competes with the training while it writes.
    """

    def __init__(self, run: "TrainingRun", folder: Path):
        self.folder, self.device = folder, run.device
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.buffers: dict[str, Tensor] = {}  # by the place in the state
        # The optimizer has no state before its first step; pages are handed out when something is written to them.
        for index, weight in enumerate(run.parameters):
            for key in OPTIMIZER_STATE[run.recipe.optimizer]:
                self._buffer(f"['optimizer']['state'][{index}]['{key}']", weight).zero_()
        for name, weight in run.model.state_dict().items():
            self._buffer(f"['model']['{name}']", weight).zero_()

    def save(self, state: dict[str, Any]) -> None:
        """Take the `state` of the run as it is now, and begin to write it to checkpoint.pt."""
        self.wait()
        state = tree.tree_map_with_path(self._copy, state)  # lists and dicts too: the run's own go on changing
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        # No daemon: a program that ends, ends after its checkpoint.
        self.thread = threading.Thread(target=self._write, args=(state, copied), name="checkpoint")
        self.thread.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises SpeedkitError when the last checkpoint could not be."""
        self.join()
        if self.error is not None:
            raise SpeedkitError(f"the checkpoint could not be written to {self.folder}: {self.error}") from self.error

    def join(self) -> None:
        """Return when nothing is being written, whatever came of it."""
        if self.thread is not None:
            self.thread.join()
        self.thread = None

    def _buffer(self, place: str, like: Tensor) -> Tensor:
        """Return the buffer on the host for the tensor at `place`, of the shape and dtype of `like`."""
        buffer = self.buffers.get(place)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
            self.buffers[place] = buffer
        return buffer

    def _copy(self, path: tuple[Any, ...], leaf: Any) -> Any:
        """Return a copy of a tensor in its buffer, from a GPU still on its way; anything else as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        return self._buffer(tree.keystr(path), leaf).copy_(leaf, non_blocking=True)

    def _write(self, state: dict[str, Any], copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            with atomic(self.folder / NAME) as temporary:
                torch.save(state, temporary)
                digest = xxhash.xxh3_64_digest(np.memmap(temporary, np.uint8, "r").data)
                with temporary.open("ab") as stream:
                    stream.write(digest)
                if (self.folder / NAME).exists():  # killed after this, `load` finds the one before
                    (self.folder / NAME).replace(self.folder / PREVIOUS)
        except BaseException as error:
            self.error = error  # raised by the next `wait`, in the thread that trains


def save(run: "TrainingRun") -> None:
    """Begin to write the state of `run` to checkpoint.pt in its `out` folder; the one before it is kept."""
    state: dict[str, Any] = {
        "job": job_of(run),
        "step": run.step,
        "epoch": run.train_batches.epoch,
        "position": run.train_batches.position,
        "model": dict(run.model.state_dict()),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "pending": [float(loss) for loss in run.losses],
        "positions": list(run.positions),
        "bad": list(run.guard.bad),
        "good_steps": int(run.guard.good_steps) if run.guard.active else None,
        "recovery": {name: getattr(run.recovery, name) for name in RECOVERY},
        "rng": get_random_state(run.device),
        "history": {name: getattr(run.history, name) for name in HISTORY},
    }
    if run.ranks is not None:
        state = run.ranks.full_state(state)
    if run.writer is not None:
        run.writer.save(state)


def load(run: "TrainingRun", folder: Path) -> None:
    """Put `run` where the newest whole checkpoint in `folder` left off; leave it as it is where there is none at all.

    Raises UsageError when the checkpoint is of another workload, recipe or data set: going on would not be the same
    run. Another plan is fine, that is what a plan is. Raises SpeedkitError when there are some and none can be read.
    """
    newest = _newest(run, folder)
    if newest is not None:
        _restore(run, *newest)


def _newest(run: "TrainingRun", folder: Path) -> tuple[dict[str, Any], str] | None:
    """Return state and path of the newest whole checkpoint in `folder`."""
    damaged = ""
    for path in (folder / NAME, folder / PREVIOUS):
        if not path.exists():
            continue
        try:
            state = read(path)
        except Exception as error:  # torch raises whatever its unpickler does
            damaged = damaged or f"{path} cannot be read ({error or type(error).__name__})".replace("\n", " ")
            continue
        if damaged:
            run.progress.say(f"  {damaged}: going on from {path.name}, step {state['step']}")
        return state, str(path)
    if damaged:
        raise SpeedkitError(f"{damaged}, nor can one before it: remove it to start over")
    return None


def read(path: Path) -> dict[str, Any]:
    """Return the state in the checkpoint at `path`. Raises when it is not as it was written."""
    whole = np.memmap(path, np.uint8, "r")
    if xxhash.xxh3_64_digest(whole[:-DIGEST_BYTES].data) != whole[-DIGEST_BYTES:].tobytes():
        raise ValueError("its checksum is wrong: it was cut short or changed")
    return torch.load(path, map_location="cpu", weights_only=True)


def _restore(run: "TrainingRun", state: dict[str, Any], path: str) -> None:
    changed = [
        f"{key} is {state['job'].get(key)} there, {here} here"
        for key, here in job_of(run).items()
        if state["job"].get(key) != here
    ]
    if changed:
        raise UsageError(f"{path} belongs to another run: {'; '.join(changed)}")
    if run.ranks is not None:
        state = run.ranks.local_state(run, state)
    try:
        run.model.load_state_dict(state["model"])
        restore_optimizer(run.optimizer, state["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{path} holds another model than {run.workload.name} makes now") from error
    if state["scaler"]:  # empty where the plan had no float16
        run.scaler.load_state_dict(state["scaler"])
    run.step, run.train_batches.epoch, run.train_batches.position = state["step"], state["epoch"], state["position"]
    run.losses = list(torch.tensor(state["pending"], device=run.device))
    run.positions = [(epoch, position) for epoch, position in state["positions"]]
    run.guard.bad = [flag.to(run.device) for flag in state["bad"]]
    # Of a run without a guard, which counts nothing, all steps were good.
    run.guard.good_steps.fill_(run.step if state["good_steps"] is None else state["good_steps"])
    vars(run.recovery).update(state["recovery"])
    set_random_state([random_state.cpu() for random_state in state["rng"]], run.device)
    vars(run.history).update(state["history"], resumed_from=run.step)


def job_of(run: "TrainingRun") -> dict[str, Any]:
    """Return what two runs have in common that are one."""
    return {"workload": run.workload.name, "train_items": len(run.workload.train), **dataclasses.asdict(run.recipe)}
