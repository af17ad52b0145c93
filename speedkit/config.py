"""Settings: frozen pydantic dataclasses that say in one sentence what they cannot be, with YAML in and out."""

import contextlib
import difflib
import inspect
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import pydantic  # loads its parts when they are first used: importing this module is cheap
import yaml

from speedkit.display import table
from speedkit.errors import PlanError
from speedkit.renamed import spelling_of_today

T = TypeVar("T")

TYPES = {"integer": "an integer", "number": "a number", "boolean": "true | false", "null": "none"}  # of JSON
LIMITS = {"minimum": "from", "maximum": "to"}
WORDS = {"none": None, "null": None, "true": True, "yes": True, "false": False, "no": False}


class Setting(NamedTuple):
    """A field of a settings class: its help with its unit, its default, and in words what it takes."""

    help: str
    default: Any
    takes: tuple[str, ...]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen pydantic dataclass that takes nothing but its fields, by name and exactly typed.

    The docstring under a field is its help. Making one raises PlanError for an unknown name or an impossible value.
    """
    config = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    model: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config)
    validate = model.__init__

    def __init__(self: Any, /, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise PlanError(f"{cls.__name__} takes its fields by name, not {unnamed[0]!r:.60}")
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            value = first["input"]
            fields = settings_of(model)
            if name not in fields:
                hint = spelling_of_today(name) or nearest(name, fields)
                raise PlanError(f"{name!r:.60} is not a field of {cls.__name__}{hint}") from None
            takes = fields[name].takes
            words = f"; it takes {' | '.join(takes)}{nearest(str(value), takes)}"
            hint = spelling_of_today(f"{name}={value}") or words
            raise PlanError(f"{name}={value!r:.60} is not possible{hint}") from None

    model.__init__ = __init__
    model.__repr__ = _in_python
    model._repr_html_ = _in_html
    # Let `help` and Shift-Tab show each field with its values, default and help; pydantic shows objects of its own.
    hints = typing.get_type_hints(model)  # without what pydantic is told beside the type
    parameters = []
    for name, field in model.__pydantic_fields__.items():
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        parameters.append(parameter.replace(annotation=hints[name]))
        model.__doc__ += f"\n{name}: {' '.join(field.description.split())}"
    model.__signature__ = inspect.Signature(parameters)
    return model


def _changed(instance: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    defaults = type(instance).__pydantic_fields__
    return {name: value for name, value in vars(instance).items() if value != defaults[name].default}


def _in_python(instance: Any) -> str:
    fields = [f"{name}={value!r}" for name, value in _changed(instance).items()]
    return f"{type(instance).__name__}({', '.join(fields)})"


def _in_html(instance: Any) -> str:
    fields = settings_of(type(instance))
    rows = []
    for name, value in _changed(instance).items():
        rows.append((name, value, fields[name].default, fields[name].help))
    return table(repr(instance), ("field", "value", "default", "help"), rows)


def settings_of(cls: type) -> dict[str, Setting]:
    """Return the fields of the settings class `cls` by name, in the order they are written."""
    found = {}
    for name, field in pydantic.TypeAdapter(cls).json_schema()["properties"].items():
        text = " ".join(field["description"].split())
        found[name] = Setting(text, field["default"], tuple(_values_in_words(field)))
    return found


def _values_in_words(schema: Mapping[str, Any]) -> Iterable[str]:
    for variant in schema.get("anyOf", [schema]):
        if variant["type"] == "string":
            yield from variant.get("enum") or [variant["const"]]
        else:
            limits = [f" {word} {variant[key]:g}" for key, word in LIMITS.items() if key in variant]
            yield TYPES[variant["type"]] + "".join(limits)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the known word nearest to `word`, or "" where none is near."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a `cls` of `values`, among which texts may stand for numbers. Raises PlanError as `cls` itself does."""
    return cls(**{name: _from_text(value) for name, value in values.items()})


def _from_text(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return WORDS.get(text.lower(), text)


def from_yaml(cls: type[T], path: str | Path) -> T:
    """Return the `cls` in the YAML file at `path`. Raises PlanError with the file and what is wrong in it."""
    try:
        return from_mapping(cls, _texts_in(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError, RecursionError, PlanError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PlanError(f"{path}: {why}") from error


def _texts_in(text: str) -> dict[str, str]:
    """Return the values in YAML as texts, as on the command line: a reader that tells types makes a bare `off` false.

    What stands for something else in the file (aliases) is not filled in: it may be of any size.
    """
    node = yaml.compose(text, yaml.BaseLoader)
    if not isinstance(node, yaml.MappingNode):
        raise PlanError("it must hold lines of `field: value`")
    values: dict[str, str] = {}
    for key, value in node.value:
        if not (isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)):
            raise PlanError(f"line {key.start_mark.line + 1} is no `field: value`: a field has one value")
        if key.value in values:
            raise PlanError(f"{key.value} stands there twice")
        values[key.value] = value.value
    return values


def to_yaml(instance: Any) -> str:
    """Return `instance` as YAML: a line for each field, with its meaning as a comment."""
    text = ""
    for name, setting in settings_of(type(instance)).items():
        line = yaml.safe_dump({name: getattr(instance, name)}).strip()
        text += f"{line}  # {setting.help}\n"
    return text
