"""The errors a user can cause or must know of. Each carries one sentence: what, where, what to do."""

import os
from collections.abc import Mapping

BAD_SHARE = 0.05  # with more bad files than this, what is learned is no longer what was asked


class SpeedkitError(Exception):
    """A run failed for a reason the user can read and act on; the command line exits with `exit_code`."""

    exit_code = 1


class UsageError(SpeedkitError):
    """What was asked cannot be done as asked: a missing folder, an unknown name, an output that is in use."""

    exit_code = 2


class PlanError(UsageError):
    """A plan or recipe field has an unknown name or an impossible value."""


class DataError(SpeedkitError):
    """Batches can be loaded no more: a loader process failed, died or hangs."""


class Interrupted(SpeedkitError):
    """Ctrl-C or SIGTERM ended a run after its checkpoint was written; `exit_code` is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


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
