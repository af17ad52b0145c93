"""The file of a checkpoint, written in a thread and read with its checksum: whole on disk or not there."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils import _pytree as tree

from speedkit.errors import SpeedkitError
from speedkit.files import atomic

NAME, PREVIOUS = "checkpoint.pt", "checkpoint-1.pt"
DIGEST_BYTES = 8  # at the end of the file, which readers of zip archives pass over: xxh3 of all before


class CheckpointWriter:
    """Writes the checkpoints of one run in a thread: the run waits while its state is copied, and no longer.

    The copy goes into buffers that are used again: the system hands memory out page by page, which costs far more than
    copying. On few cores the thread competes with the training while it writes.
    """

    def __init__(self, folder: Path, device: torch.device):
        self.folder = folder
        self.device = device
        self.executor = ThreadPoolExecutor(1)  # a program that ends, ends after its checkpoint
        self.writing: Future[None] | None = None
        self.buffers: list[Tensor] = []

    def save(self, state: dict[str, Any]) -> None:
        """Take the `state` of the run as it is now, and begin to write it to checkpoint.pt."""
        self.wait()
        tensors = [leaf for leaf in tree.tree_leaves(state) if isinstance(leaf, Tensor)]
        if len(self.buffers) != len(tensors):  # optimizers make their state in the first step that they take
            pinned = self.device.type == "cuda"
            self.buffers = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in tensors]
        buffers = iter(self.buffers)
        state = tree.tree_map_only(Tensor, lambda tensor: next(buffers).copy_(tensor), state)  # lists are copied too
        self.writing = self.executor.submit(self._write, state)

    def wait(self) -> None:
        """Return when nothing is being written. Raises SpeedkitError when the last checkpoint could not be."""
        error = None if self.writing is None else self.writing.exception()
        if error is not None:
            why = str(error)
            if shutil.disk_usage(self.folder).free < sum(buffer.nbytes for buffer in self.buffers):
                why = "the disk is full"  # torch's writer says something else
            raise SpeedkitError(f"the checkpoint could not be written to {self.folder}: {why}") from error

    def _write(self, state: dict[str, Any]) -> None:
        with atomic(self.folder / NAME) as temporary:
            torch.save(state, temporary)
            digest = xxhash.xxh3_64_digest(np.memmap(temporary, np.uint8, "r").data)
            with temporary.open("ab") as stream:
                stream.write(digest)
            if (self.folder / NAME).exists():  # killed after this, `load` finds the one before
                (self.folder / NAME).replace(self.folder / PREVIOUS)


def read(path: Path) -> dict[str, Any]:
    """Return the state in the checkpoint at `path`. Raises when it is not as it was written."""
    whole = np.memmap(path, np.uint8, "r")
    if xxhash.xxh3_64_digest(whole[:-DIGEST_BYTES].data) != whole[-DIGEST_BYTES:].tobytes():
        raise ValueError("its checksum is wrong: it was cut short or changed")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or "job" not in state:
        raise ValueError("it is that of another program")
    return state
