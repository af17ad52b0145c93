"""One description per setting, from which validation, YAML, the command line and notebook parameters are made.

A settings class is a frozen dataclass whose fields are written with `setting(...)`.
"""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from speedkit.errors import PlanError

T = TypeVar("T")
WORDS = {"none": None, "null": None, "true": True, "yes": True, "false": False, "no": False}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a settings class: its name, the types it takes, its default and what it means."""

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


def setting(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field that carries its own description: `unit`, `choices`, `minimum`, `maximum`."""
    return dataclasses.field(default=default, metadata={"help": help, **about})


def choice(help: str, *words: str) -> Any:
    """Return a dataclass field that takes one of `words`, by default the first."""
    return setting(words[0], help, choices=words)


def described(cls: type) -> list[Setting]:
    """Return the settings of class `cls`, in the order they are written."""
    kinds = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(cls).items()}
    return [
        Setting(field.name, kinds[field.name], field.default, **field.metadata) for field in dataclasses.fields(cls)
    ]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the known word nearest to `word`, or nothing when none is near."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def check(instance: Any) -> None:
    """Raise PlanError unless every field of `instance` holds a value it can take."""
    for about in described(type(instance)):
        check_value(about, getattr(instance, about.name))


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


def from_mapping(cls: type[T], values: Mapping[str, Any], formerly: Mapping[str, str] | None = None) -> T:
    """Return a `cls` with `values` set.

    Raises PlanError for an unknown name, with the nearest right one; `formerly` maps flags of other tools to the
    setting that does the same here.
    """
    known = {about.name: about for about in described(cls)}
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            moved = (formerly or {}).get(str(name).lower())
            hint = f": here that is {moved}" if moved else nearest(str(name), known)
            raise PlanError(f"{name!r} is not a field of {cls.__name__}{hint}")
        # YAML reads a bare `off` as false, and `1e-3` as text.
        if value is False and bool not in known[name].kinds and "off" in known[name].choices:
            value = "off"
        given[name] = parse(known[name], value) if isinstance(value, str) else value
    return cls(**given)


def from_yaml(cls: type[T], path: str | Path, formerly: Mapping[str, str] | None = None) -> T:
    """Return the `cls` that the YAML file at `path` describes; a PlanError names the file and what is wrong in it."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PlanError(f"{path} cannot be read as a YAML file ({why})") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path} must hold `field: value` lines for a {cls.__name__}, not {type(values).__name__}")
    try:
        return from_mapping(cls, values, formerly)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def to_yaml(instance: Any) -> str:
    """Return `instance` as YAML, one line per field, each with its meaning as a comment."""
    lines = []
    for about in described(type(instance)):
        value = yaml.safe_dump(getattr(instance, about.name), default_flow_style=True).splitlines()[0]
        unit = f" [{about.unit}]" if about.unit else ""
        lines.append(f"{about.name}: {value}  # {about.help}{unit}")
    return "\n".join(lines) + "\n"
