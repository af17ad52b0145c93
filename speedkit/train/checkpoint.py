"""Checkpoints: all that a run needs to go on as if it had never stopped, whole on disk or not there."""

import dataclasses
import itertools
import mmap
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.utils import _pytree as tree

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic

NAME = "checkpoint.pt"
OLDER = ("checkpoint-1.pt", "checkpoint-2.pt")  # the ones before, the last first
DIGEST_BYTES = 8  # at the end of the file, which readers of zip archives pass over: xxh3 of all before
GROWING = "loss log_steps log_step_s evaluations seconds quarantined skipped overflows recoveries"  # of a history


class Keeper:
    """Writes the checkpoints of one run, in the background: the run waits while its state is copied, and no longer.

    The copy goes into tensors that are made beforehand and used again and again: the system hands memory out page by
    page, which costs far more than copying. A thread then writes it, with a checksum that is verified when it is read.
    On few cores that thread competes with the training while it writes.
    """

    def __init__(self, run: Any, folder: Path):
        self.folder, self.device = folder, run.device
        self.writer: threading.Thread | None = None
        self.error: BaseException | None = None
        self.stock: dict[Any, list[Tensor]] = defaultdict(list)  # by shape and dtype
        # Weights, and as much for the optimizer, which has nothing yet; pages are handed out at the first writing.
        for weight in run.model.state_dict().values():
            for _ in range(3):
                self._another(weight).zero_()

    def save(self, state: dict[str, Any]) -> None:
        """Take the `state` of the run as it is now, and begin to write it to checkpoint.pt."""
        self.wait()
        state = self._copied(state)
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        # No daemon: a program that ends, ends after its checkpoint.
        self.writer = threading.Thread(target=self._write, args=(state, copied), name="checkpoint")
        self.writer.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises SpeedkitError when the last checkpoint could not be."""
        if self.writer is not None:
            self.writer.join()
        error, self.writer, self.error = self.error, None, None
        if error is not None:
            raise SpeedkitError(f"the checkpoint could not be written to {self.folder}: {error}") from error

    def _another(self, like: Tensor) -> Tensor:
        """Return one more tensor on the host of this shape and dtype, added to the stock."""
        made = torch.empty(like.shape, dtype=like.dtype, pin_memory=self.device.type == "cuda")
        self.stock[like.shape, like.dtype].append(made)
        return made

    def _copied(self, state: Any) -> Any:
        """Return `state` with its tensors copied into the stock; a GPU's are still on their way."""
        free = {key: list(tensors) for key, tensors in self.stock.items()}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = free.get((leaf.shape, leaf.dtype))
            return (own.pop() if own else self._another(leaf)).copy_(leaf, non_blocking=True)

        return tree.tree_map(copied, state)  # lists and dicts are made anew: the run's own go on changing

    def _write(self, state: Any, copied: torch.cuda.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            with atomic(self.folder / NAME) as temporary:
                with temporary.open("wb") as stream:
                    hashing = _Hashing(stream)
                    torch.save(state, hashing)  # type: ignore[arg-type]  # all that it uses is there
                    stream.write(hashing.digest.digest())
                self._rotate()
        except BaseException as error:
            self.error = error  # told by the next `wait`, in the thread that trains

    def _rotate(self) -> None:
        """Move the checkpoints that are there one place back. Killed in between, `load` finds what is there."""
        for newer, older in reversed([*itertools.pairwise((NAME, *OLDER))]):
            if (self.folder / newer).exists():
                (self.folder / newer).replace(self.folder / older)


class _Hashing:
    """A file to write to that knows the checksum of what was written."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.digest = stream, xxhash.xxh3_64()

    def write(self, part: Any) -> int:
        self.digest.update(part)
        return self.stream.write(part)

    def flush(self) -> None:
        self.stream.flush()


def _state(run: Any) -> dict[str, Any]:
    """Return all that going on from here takes."""
    return {
        "job": _job(run),
        "step": run.step,
        "epoch": run.batches.epoch,
        "position": run.batches.position,
        "model": dict(run.model.state_dict()),
        "optimizer": run.optimizer.state_dict(),
        "scale": run.scale and vars(run.scale),
        "pending": [float(loss) for loss in run.pending],
        "guard": run.guard.state(),
        "recovery": run.recovery.state(),
        "rng": get_random_state(run.device),
        "history": {name: getattr(run.history, name) for name in GROWING.split()},
    }


def save(run: Any) -> None:
    """Begin to write the state of `run` to checkpoint.pt in its `out` folder; the two before it are kept."""
    state = _state(run)
    if run.ranks is not None:
        state = run.ranks.collect(state)
    if run.keeper is not None:
        run.keeper.save(state)


def load(run: Any, folder: Path) -> None:
    """Put `run` where the newest whole checkpoint in `folder` left off; leave it as it is where there is none at all.

    Raises UsageError when the checkpoint is of another workload, recipe or data set: going on would not be the same
    run. Another plan is fine, that is what a plan is. Raises SpeedkitError when there are some and none can be read.
    """
    found = _newest(run, folder) if run.ranks is None or not run.ranks.rank else None
    if run.ranks is not None:
        found = run.ranks.spread(found)
    if found is not None:
        _restore(run, *found)


def _newest(run: Any, folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return state and path of the newest whole checkpoint in `folder`."""
    damaged = []
    for path in (folder / name for name in (NAME, *OLDER)):
        if not path.exists():
            continue
        try:
            state = read(path, run.device)
        except Exception as error:  # torch raises whatever its unpickler does
            damaged.append(f"{path} cannot be read ({error or type(error).__name__})".replace("\n", " "))
            continue
        if damaged:
            run.progress.say(f"  {damaged[0]}: going on from {path.name}, step {state['step']}")
        return state, path
    if damaged:
        raise SpeedkitError(f"{damaged[0]}, nor can one before it: remove it to start over")
    return None


def read(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the state in the checkpoint at `path`. Raises when it is not as it was written."""
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held,
        memoryview(held) as whole,
        whole[:-DIGEST_BYTES] as body,
    ):
        same = xxhash.xxh3_64_digest(body) == held[-DIGEST_BYTES:]
    if not same:
        raise ValueError("its checksum is wrong: it was cut short or changed")
    return torch.load(path, map_location=device, weights_only=True)


def _restore(run: Any, state: dict[str, Any], path: Path) -> None:
    changed = [
        f"{key} is {state['job'].get(key)} there, {mine} here"
        for key, mine in _job(run).items()
        if state["job"].get(key) != mine
    ]
    if changed:
        raise UsageError(f"{path} belongs to another run: {'; '.join(changed)}")
    if run.ranks is not None:
        state = run.ranks.own(run, state)
    try:
        run.model.load_state_dict(state["model"])
        restore_optimizer(run.optimizer, state["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{path} holds another model than {run.workload.name} makes now") from error
    if run.scale and state["scale"]:
        for name, value in state["scale"].items():
            getattr(run.scale, name).copy_(value)
    run.step, run.batches.epoch, run.batches.position = state["step"], state["epoch"], state["position"]
    run.pending = list(torch.tensor(state["pending"], device=run.device))
    run.guard.load(state["guard"], run.step)
    run.recovery.load(run, state["recovery"])
    set_random_state([rng.cpu() for rng in state["rng"]], run.device)
    vars(run.history).update(state["history"], resumed_from=run.step)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, perhaps that of another plan, without parting the schedule from the tensor that it writes into."""
    decided = {"lr", "fused", "foreach", "capturable"}  # by the plan
    mine = [{name: group[name] for name in decided & group.keys()} for group in optimizer.param_groups]
    for group, own in zip(state["param_groups"], mine, strict=True):
        group.update(own)  # `fused` decides, while loading, on which device step counts live
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, mine, strict=True):
        group.update(own)  # loading has made copies


def get_random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the global random generators that training on `device` draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Set them as `get_random_state` returned them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _job(run: Any) -> dict[str, Any]:
    """Return what two runs have in common that are one."""
    return {"workload": run.workload.name, "train_items": len(run.workload.train), **dataclasses.asdict(run.recipe)}
