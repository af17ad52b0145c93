"""What the parameters of a notebook are described by."""

import contextlib
import dataclasses
import math
import types
from typing import Any

from speedkit.config import nearest
from speedkit.errors import PlanError

__all__ = ["Setting", "check_value", "nearest", "parse"]

WORDS = {"none": None, "null": None, "true": True, "yes": True, "false": False, "no": False}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One parameter: its name, the types it takes, its default and what it means."""

    name: str
    kinds: tuple[type, ...]  # of int, float, str, bool, NoneType
    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()  # the words it takes; besides numbers, where kinds has them
    minimum: float = -math.inf
    maximum: float = math.inf

    @property
    def takes(self) -> str:
        """What values are possible, in words: `off | disk | ram`, `an integer from 1`, ..."""
        low = f" from {self.minimum:g}" if self.minimum > -math.inf else ""
        high = f" to {self.maximum:g}" if self.maximum < math.inf else ""
        kinds = {
            bool: "true | false",
            int: f"an integer{low}{high}",
            float: f"a number{low}{high}",
            types.NoneType: "none",
        }
        return " | ".join([*self.choices, *(text for kind, text in kinds.items() if kind in self.kinds)])


def check_value(about: Setting, value: Any) -> None:
    """Raise PlanError unless `value` is one that the setting `about` takes."""
    if isinstance(value, str):
        possible = value in about.choices
    elif isinstance(value, bool | types.NoneType):
        possible = type(value) in about.kinds
    else:
        number = isinstance(value, about.kinds) or (isinstance(value, int) and float in about.kinds)
        possible = number and about.minimum <= value <= about.maximum  # False for NaN
    if not possible:
        near = nearest(value, about.choices) if isinstance(value, str) else ""
        raise PlanError(f"{about.name}={value!r} is not possible; it takes {about.takes}{near}")


def parse(about: Setting, text: str) -> Any:
    """Return the value that `text`, typed on a command line, stands for; raises PlanError naming what is possible."""
    value: Any = text.strip()
    if value.lower() in WORDS and type(WORDS[value.lower()]) in about.kinds:
        value = WORDS[value.lower()]
    for kind in (int, float):
        if kind in about.kinds and isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = kind(value)
    check_value(about, value)
    return value
