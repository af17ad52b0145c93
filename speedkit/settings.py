"""One description per setting, from which validation, YAML, the command line and notebook parameters are made.

A settings class is a frozen dataclass whose fields are written with `setting(...)`.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from speedkit.errors import PlanError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a settings class: its name, the types it takes, its default and what it means."""

    name: str
    kinds: tuple[type, ...]  # of int, float, str, bool, NoneType
    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()  # the words it takes; besides numbers, where kinds has them
    minimum: float | None = None
    maximum: float | None = None

    @property
    def takes(self) -> str:
        """What values are possible, in words: `off | disk | ram`, `an integer from 1`, ..."""
        parts = list(self.choices)
        if bool in self.kinds:
            parts.append("true | false")
        for kind, word in ((int, "an integer"), (float, "a number")):
            if kind in self.kinds and not (kind is int and float in self.kinds):
                low = "" if self.minimum is None else f" from {self.minimum:g}"
                high = "" if self.maximum is None else f" to {self.maximum:g}"
                parts.append(f"{word}{low}{high}")
        if types.NoneType in self.kinds:
            parts.append("none")
        return " | ".join(parts)


def setting(default: Any, help: str, *, unit: str = "", choices: Iterable[str] = (), minimum=None, maximum=None) -> Any:
    """Return a dataclass field that carries its own description."""
    about = {"help": help, "unit": unit, "choices": tuple(choices), "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=about)


def described(cls: type) -> list[Setting]:
    """Return the settings of class `cls`, in the order they are written."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        found.append(Setting(field.name, kinds, field.default, **field.metadata))
    return found


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
    wrong = PlanError(f"{about.name}={value!r} is not possible; it takes {about.takes}")
    if isinstance(value, str):
        if value not in about.choices:
            raise PlanError(f"{wrong}{nearest(value, about.choices)}")
    elif isinstance(value, bool) or value is None:
        if type(value) not in about.kinds:
            raise wrong
    elif isinstance(value, int | float):
        if float not in about.kinds and not (isinstance(value, int) and int in about.kinds):
            raise wrong
        low = about.minimum is not None and not value >= about.minimum  # also true for NaN
        high = about.maximum is not None and not value <= about.maximum
        if low or high:
            raise wrong
    else:
        raise wrong


def parse(about: Setting, text: str) -> Any:
    """Return the value that `text`, typed on a command line, stands for; raises PlanError naming what is possible."""
    word = text.strip()
    value: Any = word
    if word.lower() in ("none", "null") and types.NoneType in about.kinds:
        value = None
    elif word.lower() in ("true", "yes", "false", "no") and bool in about.kinds:
        value = word.lower() in ("true", "yes")
    elif word not in about.choices:
        for kind in (int, float):
            if kind in about.kinds and isinstance(value, str):
                try:
                    value = kind(word)
                except ValueError:
                    continue
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
