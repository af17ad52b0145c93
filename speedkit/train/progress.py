"""The progress of a run: a bar on a terminal and in a notebook, plain lines in a log, or nothing."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

# Seconds between updates; plain lines, a sign of life in a log file, are rarer.
UPDATE_EVERY_S = {"bar": 0.5, "lines": 5.0}


def wanted(show: bool | str) -> bool:
    """Return whether to show progress: "auto" means yes unless SPEEDKIT_PROGRESS=off."""
    return os.environ.get("SPEEDKIT_PROGRESS") != "off" if show == "auto" else bool(show)


def display_mode(show: bool | str) -> str:
    """Return how to show progress here: "bar", "lines" or "off"."""
    if not wanted(show):
        return "off"
    kernel = None
    ipython = sys.modules.get("IPython")
    if ipython is not None:
        kernel = getattr(ipython.get_ipython(), "kernel", None)
    # JupyterLab, Notebook and VS Code name the cell that they ask to run. Papermill, nbval and nbconvert, whose outputs
    # are kept and compared, do not.
    in_a_cell = kernel is not None and "cellId" in kernel.get_parent().get("metadata", {})
    return "bar" if in_a_cell or sys.stderr.isatty() else "lines"


class Progress:
    """Shows loss, score and rates at log points, from numbers that were read there anyway: it never waits for a GPU."""

    def __init__(self, name: str, total: int, batch_size: int, *, show: bool | str):
        self.name = name
        self.total = total
        self.batch_size = batch_size
        self.mode = display_mode(show)
        self.look = ""  # the last evaluation, in words
        self.next_s = 0.0  # time of the next update
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # without tqdm's own rate and time left
        self.bar = tqdm(total=total, desc=name, bar_format=form, mininterval=0, disable=self.mode != "bar")

    def due(self, step: int) -> bool:
        """Return whether to show `step`."""
        if self.mode == "off":
            return False
        return time.perf_counter() >= self.next_s or step == self.total

    def update(self, step: int, step_s: float, loss: float, *, score: float | None, metric: str) -> None:
        """Show where the run is; `step_s` and `loss` are means since the last log point, `score` of the last batch."""
        self.next_s = time.perf_counter() + UPDATE_EVERY_S[self.mode]
        left = f"{tqdm.format_interval((self.total - step) * step_s)} left"
        text = f"loss {loss:.4f}"
        if score is not None:
            text += f", {metric} {score:.3f}"
        text += f"{self.look}, {self.batch_size / step_s:.0f} samples/s"
        if self.mode == "bar":
            self.bar.set_postfix_str(f"{left}, {text}", refresh=False)  # a narrow terminal cuts off the end
            with unless_gone(sys.stdout, sys.stderr):
                self.bar.update(step - self.bar.n)
        else:
            put_out(f"{self.name} step {step}/{self.total}: {text}, {left}")

    def say(self, text: str) -> None:
        """Print a line; a bar stays below it."""
        if self.mode == "bar":
            with unless_gone(sys.stdout, sys.stderr):
                self.bar.write(text)
        elif self.mode != "off":
            put_out(text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        with unless_gone(sys.stdout, sys.stderr):
            self.bar.close()


def bar_of(unit: str, name: str, most: int | None, *, show: bool | str) -> tqdm:
    """Return a bar for the pairs or steps of a measurement, at most so many; lines in a log would be too many."""
    form = f"{{desc}}: {{bar}} {unit} {{n_fmt}} of at most {{total_fmt}} [{{elapsed}}{{postfix}}]"
    bar = tqdm(total=most, desc=name, bar_format=form, leave=False, disable=display_mode(show) != "bar")
    bar.set_postfix_str("compiling and warming up")
    return bar


def put_out(text: str) -> None:
    """Print a line."""
    with unless_gone(sys.stdout):
        print(text, flush=True)


@contextlib.contextmanager
def unless_gone(*streams: TextIO) -> Iterator[None]:
    """Where the terminal, the pipe or the disk that `streams` go to is gone, let nothing be printed there any more."""
    try:
        yield
    except OSError:
        for stream in streams:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
