"""How a command ends: done, failed or stopped; in one sentence and an exit code."""

import atexit
import contextlib
import functools
import os
import signal
import sys
from typing import Any, NoReturn

import click
import torch

from speedkit.data.batches import STOPS
from speedkit.errors import Interrupted
from speedkit.machine import cache_root
from speedkit.options import explained


def run_command(command: click.Command, name: str) -> NoReturn:
    """Run a command line and end this process; a failure is one sentence and an exit code.

    A traceback is shown with --debug only.
    """
    ends = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    came: list[Interrupted] = []
    for number in ends:
        signal.signal(number, functools.partial(_terminate, came))
    sys.unraisablehook = _leave_if_dropped  # in the callback of a weak reference, say
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))  # kept: compiled once
    try:
        code = command.main(prog_name=name, standalone_mode=False) or 0
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        for number in ends:
            signal.signal(number, signal.SIG_IGN)  # a closed terminal sends two; the code says what the first one did
        # An import that a signal cut short says something else.
        code, sentence = explained(came[0] if came else error)
        say(sentence)
    else:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)  # Python would print what is raised on its way out
    _leave(code)


def _terminate(came: list[Interrupted], number: int, _frame: Any) -> NoReturn:
    if came:  # the second one: at once, as if killed
        os._exit(came[0].exit_code)
    # As an exception, so that loader processes are ended and half-written files removed on the way out.
    came.append(Interrupted(f"stopped by {signal.Signals(number).name}; what was complete is kept", number))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise came[-1]


def _leave_if_dropped(dropped: Any) -> None:
    """End this process where Python drops what `_terminate` raised."""
    if not isinstance(dropped.exc_value, KeyboardInterrupt | Interrupted):
        sys.__unraisablehook__(dropped)
        return
    code, sentence = explained(dropped.exc_value)
    say(sentence)
    os._exit(code)


def say(sentence: str) -> None:
    """Print a sentence beside what a command puts out."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        click.echo(f"speedkit: {' '.join(sentence.split())}", err=True)


def _leave(code: int) -> NoReturn:
    """End this process with an exit code.

    At once where it was stopped, for Python's way out lets a second Ctrl-C kill it, and where it is a rank, for there
    gloo's threads abort at times.
    """
    if torch.distributed.is_initialized() or code > 128:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
