"""Run a script as Python would run it, from inside a process that looks on."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from speedkit.data.batches import STOPS
from speedkit.errors import UsageError


def check_script(path: Path) -> None:
    """Raise UsageError where there is no script `path`."""
    if not path.is_file():
        raise UsageError(f"there is no script {path}: name a file, with its own arguments after it")


@contextlib.contextmanager
def as_python(path: Path, arguments: Sequence[str], conclude: Callable[[], None]) -> Iterator[str]:
    """Let a script run inside as Python would run it; `conclude` is called when it ends, also by os._exit.

    Yields the name that Python gives to the script's file. A script that fails or exits does so as ever, after that.
    """
    here = os.getpid()
    name = str(path.absolute())  # now: the script may change the folder

    def concluded() -> None:
        """Conclude once this process is over."""
        if os.getpid() == here:  # and no fork of the script's
            conclude()

    try:
        with (
            patch.object(sys, "argv", [str(path), *arguments]),
            patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
            patch.object(os, "_exit", after(concluded, os._exit)),
            pythons_signals(),
        ):
            yield name
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_frame.f_code.co_filename != name:
            frame = frame.tb_next  # what runs the script is none of its business
        traceback.print_exception(type(error), error, frame)
        raise SystemExit(1) from error
    finally:
        concluded()


def after(first: Callable[[], None], leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Return `leave` with a call of `first` before it."""

    def call(code: int) -> NoReturn:
        first()
        leave(code)

    return call


@contextlib.contextmanager
def pythons_signals() -> Iterator[None]:
    """Handle signals inside as Python does by itself: the script's processes inherit it, and end when they are told."""
    with contextlib.ExitStack() as stack:
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                stack.callback(signal.signal, number, signal.signal(number, own))
        yield
