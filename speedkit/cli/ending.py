"""How a command ends: done, failed or stopped; in an exit code and, where it failed, one sentence."""

import atexit
import contextlib
import errno
import functools
import os
import re
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click
import torch

from speedkit.config import settings_of
from speedkit.data.batches import STOPS
from speedkit.errors import Interrupted, SpeedkitError, UsageError
from speedkit.machine import cache_root
from speedkit.measure.extras import missing_extra
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.renamed import spelling_of_today

ARGUMENT = re.compile(r"\b(out|resume|strict|cache_dir)=(?:True)?")  # as messages name what is an option here


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
        # What a signal cut short may say something else.
        code, sentence = explained(came[0] if came else error)
        say(sentence)
    else:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)  # Python would print what is raised on its way out
    _leave(code)


def _terminate(came: list[Interrupted], number: int, frame: FrameType | None) -> NoReturn:
    if came:  # the second one: at once, as if killed
        os._exit(came[0].exit_code)
    # As an exception, so that loader processes are ended and half-written files removed on the way out.
    came.append(Interrupted(f"stopped by {signal.Signals(number).name}; what was complete is kept", number))
    if _imports(frame):  # mpmath, which torch imports, catches whatever its imports raise
        _end_at_once(came[0])
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise came[0]


def _imports(frame: FrameType | None) -> bool:
    """Return whether `frame` is in the middle of an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _leave_if_dropped(dropped: Any) -> None:
    """End this process where Python drops what `_terminate` raised."""
    if isinstance(dropped.exc_value, KeyboardInterrupt | Interrupted):
        _end_at_once(dropped.exc_value)
    sys.__unraisablehook__(dropped)


def _end_at_once(error: BaseException) -> NoReturn:
    code, sentence = explained(error)
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


def _as_option(argument: re.Match[str]) -> str:
    return f"--{argument[1].replace('_', '-')}"


def explained(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the one sentence of a failure."""
    if isinstance(error, SpeedkitError):
        return error.exit_code, ARGUMENT.sub(_as_option, str(error))
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return 130, "stopped by SIGINT; what was complete is kept"
    if isinstance(error, click.ClickException):
        word = getattr(error, "option_name", "") or getattr(error, "command_name", "")
        hint = spelling_of_today(word, typed=True)
        field = (settings_of(Plan) | settings_of(Recipe)).get(word.lstrip("-").replace("-", "_"))
        if field is not None and isinstance(error, click.BadOptionUsage):  # its value is missing
            hint = f": {' | '.join(field.takes)}"
        if hint:
            return error.exit_code, error.message.rstrip(".") + hint
        return error.exit_code, error.format_message()
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return 1, f"the disk is full: {error}"
    sentence = missing_extra(error)
    if sentence:
        return UsageError.exit_code, sentence
    return 1, f"{type(error).__name__}: {error} (--debug shows where)"
