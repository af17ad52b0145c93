"""What measuring changes of the whole process, and puts back; what the process uses."""

import contextlib
import multiprocessing
import os
import random
from collections.abc import Iterator

import numpy as np
import psutil
import torch

from speedkit.machine import this_machine
from speedkit.train.process_state import process_state_kept


@contextlib.contextmanager
def process_kept(device: torch.device | str) -> Iterator[None]:
    """Leave what `process_state_kept` does as it is before the block, and the random states of Python and NumPy."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - somebody's data set may draw from it
    with process_state_kept(this_machine(device).device):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def resources() -> tuple[float, int]:
    """Return the seconds that this process and its workers have used cores, and the bytes that they read from disks."""
    cpu_s = 0.0
    read_bytes = 0
    for number in (os.getpid(), *(worker.pid for worker in multiprocessing.active_children())):
        with contextlib.suppress(psutil.Error, AttributeError):  # it has just ended; a system that counts no reads
            process = psutil.Process(number)
            cpu_s += sum(process.cpu_times()[:4])  # those of workers that have ended, too
            read_bytes += process.io_counters().read_bytes
    return cpu_s, read_bytes
