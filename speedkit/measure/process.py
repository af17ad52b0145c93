"""What measuring changes of the whole process, and puts back; what the process uses; and calls in a new one."""

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def new_process(make: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls, in a new Python process, the one that the context `make(...)` gives there.

    It raises SpeedkitError when that fails, or cannot be sent: what a notebook or a script defines has no module.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        send(process.stdin, (make, arguments, options))

        def call(*arguments: Any, **options: Any) -> Any:
            """Call the function there. Raises SpeedkitError where that fails."""
            send(process.stdin, (arguments, options))
            try:
                failed, answer = pickle.load(process.stdout)  # type: ignore[arg-type]
            except EOFError:
                raise SpeedkitError(f"its new process ended with exit code {process.wait()}") from None
            if failed:
                raise SpeedkitError(f"it failed in a new process: {answer}")
            return answer

        try:
            yield call
        finally:
            with contextlib.suppress(BrokenPipeError):  # what was sent to a process that had ended
                process.stdin.close()  # type: ignore[union-attr]


def send(stream: Any, message: Any) -> None:
    """Write a message to the stream of another process. Raises SpeedkitError where it cannot be sent."""
    try:
        stream.write(pickle.dumps(message))
        stream.flush()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SpeedkitError(f"it cannot be sent to a new process: {error}") from error
    except BrokenPipeError:  # its answer says why
        pass


def main() -> None:
    """Answer each message of standard input with a call, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the other one ends this
    messages = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a workload prints is no answer
    try:
        make, arguments, options = pickle.load(messages)
        with make(*arguments, **options) as function:
            while True:
                arguments, options = pickle.load(messages)
                send(answers, (False, function(*arguments, **options)))
    except EOFError:
        return
    except Exception as error:
        send(answers, (True, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
