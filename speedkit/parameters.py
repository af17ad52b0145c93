"""Reading a notebook without running it: its record, what it lets you set, and values checked against that."""

import ast
import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speedkit.errors import UsageError
from speedkit.settings import nearest

RECORD_MIME = "application/vnd.speedkit.record+json"
TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
LINE = re.compile(r"(?P<name>\w+)\s*:\s*(?P<type>(list\[)?(int|float|str|bool)(?(3)\]))(?P<optional>\s*\|\s*None)?"
                  r"\s*=\s*(?P<value>.+?)\s+#\s*(?P<comment>.+)")  # fmt: skip
FORM = ("`name: type = value  # comment`: it needs a literal value and a comment, on one line, and the type must be "
        "int, float, str, bool, a list of one of them, or one `| None`")  # fmt: skip
CHOICES = re.compile(r"[\w.+-]+(\s*\|\s*[\w.+-]+)+")


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's parameters cell: `name: type = default  # comment`."""

    name: str
    type: str  # int, float, str, bool or list[...] of one of them
    optional: bool  # annotated `... | None`
    default: Any
    comment: str
    choices: tuple[str, ...]  # of a text: the comment's `a | b | c`


def read_notebook(path: Path) -> Any:
    """Return the notebook at `path` as nbformat holds it. Raises UsageError when it is missing or is not a notebook."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise UsageError(f"notebook {path} cannot be read ({error.strerror}): name another") from error
    except (ValueError, AttributeError, KeyError, nbformat.ValidationError) as error:
        raise UsageError(f"{path} is not a Jupyter notebook: name another") from error


def code_cells(notebook: Any) -> list[Any]:
    """Return the code cells of `notebook`, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def record_of(notebook: Any) -> dict[str, Any] | None:
    """Return the record that an executed notebook carries, as its last `run.save()` displayed it; None without one."""
    shown = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
    return next((data[RECORD_MIME] for data in reversed(shown) if RECORD_MIME in data), None)


def parameters_of(path: Path) -> dict[str, Parameter]:
    """Return what the notebook at `path` lets you set. Raises UsageError when its parameters cell is not in order."""
    tagged = [cell for cell in read_notebook(path).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UsageError(f"{path.name} has {len(tagged)} cells tagged `parameters`, and needs exactly one")
    lines = [line.strip() for line in tagged[0].source.splitlines()]
    try:
        found = [_parameter(line) for line in lines if line and not line.startswith("#")]
    except ValueError as error:
        raise UsageError(f"{path.name}, parameters cell, {error}") from error
    return {parameter.name: parameter for parameter in found}


def _parameter(line: str) -> Parameter:
    """Return the parameter that one line of the cell declares. Raises ValueError when it declares none."""
    match, default = LINE.fullmatch(line), ...
    with contextlib.suppress(ValueError, SyntaxError):
        default = ast.literal_eval(match["value"]) if match else ...
    if match is None or default is ...:
        raise ValueError(f'"{line}": it is not {FORM}')
    choices = CHOICES.match(match["comment"]) if match["type"] == "str" else None
    parameter = Parameter(match["name"], match["type"], bool(match["optional"]), default, match["comment"],
                          tuple(re.split(r"\s*\|\s*", choices[0])) if choices else ())  # fmt: skip
    if isinstance(default, str) and parameter.type != "str":
        raise ValueError(f'"{line}": the value is not of the type')
    typed_value(parameter, default)
    return parameter


def typed_value(parameter: Parameter, value: Any) -> Any:
    """Return `value`, or what the text `value` means, in the parameter's type. Raises ValueError when it cannot be."""
    shown, wanted = f'"{value}"' if isinstance(value, str) else repr(value), parameter.type
    wrong = ValueError(f"{parameter.name} must be {wanted}{' or None' if parameter.optional else ''}, not {shown}")
    if parameter.optional and (value is None or str(value).lower() in ("none", "null")):
        return None
    if wanted.startswith("list["):
        if isinstance(value, str):
            value = [item.strip(" '\"") for item in value.strip("[] ").split(",") if item.strip()]
        if not isinstance(value, list | tuple):
            raise wrong
        each = replace(parameter, type=wanted[5:-1], optional=False)
        return [typed_value(each, item) for item in value]
    kind = TYPES[wanted]
    if isinstance(value, str) or (kind is float and type(value) is int):
        with contextlib.suppress(ValueError, KeyError):
            value = WORDS[str(value).strip().lower()] if kind is bool else kind(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise wrong
    if parameter.choices and value not in parameter.choices:
        known = ", ".join(parameter.choices)
        raise ValueError(f"{parameter.name} must be one of {known}, not {shown}{nearest(value, parameter.choices)}")
    return value


def typed_parameters(source: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `given` values or texts in the types that notebook `source` declares. Raises UsageError for others."""
    declared = parameters_of(source)
    for name in [name for name in given if name not in declared]:
        known = ", ".join(declared) or "none"
        raise UsageError(f'{source.name} has no parameter "{name}"{nearest(name, declared)}: it has {known}')
    try:
        return {name: typed_value(declared[name], value) for name, value in given.items()}
    except ValueError as error:
        raise UsageError(f"{source.name}: parameter {error}") from error
