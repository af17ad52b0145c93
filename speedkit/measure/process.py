"""What measuring changes of the whole process, and puts back; what the process uses; and measuring in a new one."""

import contextlib
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from speedkit.errors import SpeedkitError
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


def resources() -> tuple[float, float, int]:
    """Return the seconds that this process has used cores, those of its workers, and the bytes that all have read."""
    cpu_s = []  # of this process, and of each worker
    read_bytes = 0
    for number in (os.getpid(), *(worker.pid for worker in multiprocessing.active_children())):
        with contextlib.suppress(psutil.Error, AttributeError):  # it has just ended; a system that counts no reads
            process = psutil.Process(number)
            cpu_s.append(sum(process.cpu_times()[:4]))  # those of workers that have ended, too
            read_bytes += process.io_counters().read_bytes
    return cpu_s[0], sum(cpu_s[1:]), read_bytes


def in_new_process(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what `function` returns in a new Python process.

    Raises SpeedkitError when it fails there, or cannot be sent: what a notebook or a script defines has no module.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            Path(folder, "call").write_bytes(pickle.dumps((function, arguments, options)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SpeedkitError(f"it cannot be sent to a new process: {error}") from error
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __name__, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SpeedkitError(f"it failed in a new process: {done.stderr.strip().rpartition(chr(10))[2]}")
        return pickle.loads(Path(folder, "answer").read_bytes())


def main() -> None:
    """Make the call that lies in the folder of the first argument, and leave the answer there."""
    folder = Path(sys.argv[1])
    function, arguments, options = pickle.loads((folder / "call").read_bytes())
    (folder / "answer").write_bytes(pickle.dumps(function(*arguments, **options)))


if __name__ == "__main__":
    main()
