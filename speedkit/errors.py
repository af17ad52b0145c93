"""The errors a user can cause or must know of. Each carries one sentence: what, where, what to do."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

SO_FAR = "`so_far` of this error has what there was (in a notebook: import sys; sys.last_value.so_far)"
BAD_SHARE = 0.05  # with more bad files than this, what is learned is no longer what was asked


class SpeedkitError(Exception):
    """A run failed for a reason the user can read and act on; the command line exits with `exit_code`."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the sentence, without the lines that it came through."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(SpeedkitError):
    """What was asked cannot be done as asked: a missing folder, an unknown name, an output that is in use."""

    exit_code = 2


class PlanError(UsageError):
    """A plan or recipe field has an unknown name or an impossible value."""


class DataError(SpeedkitError):
    """Batches can be loaded no more: a loader process failed, died or hangs."""


class Interrupted(SpeedkitError):
    """Ctrl-C or SIGTERM ended a run after its checkpoint was written; `exit_code` is 128 + the signal's number.

    `so_far` is what `fit` or `compare` would have returned, of the steps or pairs that were made.
    """

    def __init__(self, message: str, signal_number: int, so_far: Any = None):
        super().__init__(message)
        self.so_far = so_far
        self.exit_code = 128 + signal_number


@contextlib.contextmanager
def stop_in_words() -> Iterator[None]:
    """Raise Interrupted for a Ctrl-C inside: one sentence instead of all the lines that it came through."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped by SIGINT before there was a result", signal.SIGINT) from None


@contextlib.contextmanager
def answered_by(handler: Callable[[int, Any], object], numbers: Iterable[int]) -> Iterator[None]:
    """Let `handler` answer the signals `numbers`; nothing changes in any but the main thread, which alone gets them."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


class BadItem(SpeedkitError):
    """One item of the data cannot be used: `path` is its file, `why` the reason."""

    def __init__(self, path: object, why: str):
        super().__init__(str(path), why)  # the arguments, with which it comes out of a loader's process too
        self.path = str(path)
        self.why = " ".join(why.split())

    def __str__(self) -> str:
        return f"{self.path} cannot be used: {self.why}"


class TooManyBad(SpeedkitError):
    """Over 5 % of `count` files are bad: `bad` is path -> why. Names their folder, and the first five in it."""

    def __init__(self, bad: Mapping[str, str], count: int):
        self.bad = dict(bad)
        paths = sorted(bad)
        folder = os.path.dirname(os.path.commonprefix(paths))  # noqa: RUF071 (a path may be any text)
        names = [path.removeprefix(folder).lstrip("/") for path in paths[:5]]
        share = f"{len(bad)} of {count} files cannot be used, over {BAD_SHARE:.0%}"
        first = f"{', '.join(names)} (the first one: {bad[paths[0]]})"
        super().__init__(f"{share}, in {folder or os.curdir}: {first}: repair or remove them")


def check_bad_share(bad: Mapping[str, str], count: int) -> None:
    """Raise TooManyBad when over 5 % of `count` files are bad; `bad` is path -> why."""
    if len(bad) > BAD_SHARE * count:
        raise TooManyBad(bad, count)
