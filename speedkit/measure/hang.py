"""A training that hangs: where its threads are, and what its loader's processes do."""

import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil

from speedkit.measure.timeline import Timeline

INDICES = "possibly_batched_index"  # what a DataLoader calls the samples that it makes


@contextlib.contextmanager
def hang_told(timeline: Timeline, hang_s: float, path: Path) -> Iterator[None]:
    """Tell once of a loop that begins and ends no part of a step for `hang_s`, on stderr and in the file `path`."""
    over = threading.Event()

    def wait() -> None:
        while not over.wait(max(0.01, timeline.last_s + hang_s - time.perf_counter())):
            if time.perf_counter() - timeline.last_s >= hang_s:
                told = f"speedkit: no step for {hang_s:.0f} seconds. {hang_in_words()}"
                path.write_text(told)
                sys.stderr.write(told)
                return

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def hang_in_words() -> str:
    """Return the stack of the main thread, the samples that it makes, and what each process of its own does."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    lines = ["The main thread is here:\n", *traceback.format_stack(frame)]
    for caller, _ in traceback.walk_stack(frame):
        if INDICES in caller.f_locals:
            lines.append(f"It makes the samples {caller.f_locals[INDICES]}.\n")
    for worker in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            process = psutil.Process(worker.pid)
            files = ", ".join(file.path for file in process.open_files()) or "no file"
            cpu_s = sum(process.cpu_times()[:2])
            lines.append(f"Process {worker.pid} is {process.status()}, has used {cpu_s:.3g} s and opened {files}.\n")
    return "".join(lines)
