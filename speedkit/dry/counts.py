"""What a GPU that is not there was asked to do: in the process that has it, and there alone."""

import collections
import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

LAUNCHED = ("kernel", "compiled", "cublas", "cufft", "cudnn", "nccl", "graph")


class Counts:
    """How often each thing happened: `names` is kind -> name -> times. What PyTorch's libraries call is a kind each."""

    def __init__(self) -> None:
        self.names: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def __getitem__(self, kind: str) -> int:
        return sum(self.names[kind].values())

    @property
    def launches(self) -> int:
        """How often the host made the GPU compute."""
        return sum(self[kind] for kind in LAUNCHED)


def library() -> ctypes.CDLL:
    """Return the stand-in that this process has. Raises KeyError in another one."""
    return ctypes.CDLL(os.environ["DRY_GPU_LIBRARY"])


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Yield what is filled, when the block ends, with what the GPU was asked to do in it."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts")
        library().dry_start()
        try:
            yield counts
        finally:
            library().dry_stop(os.fsencode(path))
        for line in path.read_text().splitlines():
            number, kind, name = line.split("\t")
            counts.names[kind][name] += int(number)
