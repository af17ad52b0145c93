"""Reading a notebook without running it: its record, what it lets you set, and values checked against that."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from speedkit.errors import PlanError, UsageError
from speedkit.settings import Setting, check_value, nearest, parse

RECORD_MIME = "application/vnd.speedkit.record+json"
KINDS = {"int": int, "float": float, "str": str, "bool": bool, "None": NoneType}
FORM = (
    "`name: type = value  # comment`: it needs a literal value and a comment, on one line, and the type must be "
    "int, float, str, bool, a list of one of them, or one `| None`"
)


def read_notebook(path: Path) -> Any:
    """Return the notebook at `path` as nbformat holds it. Raises UsageError when it is missing or is not a notebook."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, AttributeError, KeyError, nbformat.ValidationError) as error:
        why = getattr(error, "strerror", "") or "JSON of another form"
        raise UsageError(f"{path} cannot be read or is not a Jupyter notebook ({why}): name another") from error


def code_cells(notebook: Any) -> list[Any]:
    """Return the code cells of `notebook`, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def displayed(notebook: Any) -> list[Any]:
    """Return the data of each output in which a record is displayed, in order."""
    shown = (output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)
    return [data for data in shown if RECORD_MIME in data]


def record_of(notebook: Any) -> dict[str, Any] | None:
    """Return the record that an executed notebook carries, as its last `run.save()` displayed it; None without one."""
    return next((data[RECORD_MIME] for data in displayed(notebook)[-1:]), None)


def parameters_of(path: Path) -> dict[str, Setting]:
    """Return what the notebook at `path` lets you set; the default of a list is a list.

    Raises UsageError when its parameters cell is not in order.
    """
    tagged = [cell for cell in read_notebook(path).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UsageError(f"{path.name} has {len(tagged)} cells tagged `parameters`, and needs exactly one")
    lines = [line.strip() for line in tagged[0].source.splitlines()]
    try:
        found = [_parameter(line) for line in lines if line and not line.startswith("#")]
    except UsageError as error:
        raise UsageError(f"{path.name}, parameters cell: {error}") from error
    return {parameter.name: parameter for parameter in found}


def _parameter(line: str) -> Setting:
    """Return the parameter that one line of the cell declares. Raises UsageError when it declares none."""
    try:
        (node,) = ast.parse(line).body
        comment = line.encode()[node.end_col_offset :].decode().partition("#")[2].strip()
        if not (comment and isinstance(node, ast.AnnAssign) and node.value):
            raise ValueError
        default, annotation = ast.literal_eval(node.value), ast.unparse(node.annotation)
        if isinstance(default, list) != annotation.startswith("list["):
            raise ValueError
        kinds = tuple(KINDS[word] for word in annotation.removeprefix("list[").removesuffix("]").split(" | "))
    except (SyntaxError, ValueError, KeyError) as error:
        raise UsageError(f'"{line}" is not {FORM}') from error
    parameter = Setting(ast.unparse(node.target), kinds, default, comment)
    typed_value(parameter, default)
    return parameter


def typed_value(parameter: Setting, value: Any) -> Any:
    """Return `value`, or what the text `value` means, in the parameter's type. Raises PlanError when it cannot be."""
    if isinstance(parameter.default, list):
        words = re.findall(r"[^\s,\[\]][^,\[\]]*", value) if isinstance(value, str) else value
        if not isinstance(words, list | tuple):
            raise PlanError(f"{parameter.name}={value!r} is not possible; it takes a list")
        return [typed_value(replace(parameter, default=None), word) for word in words]
    if not isinstance(value, str):
        check_value(parameter, value)
        return value
    none = NoneType in parameter.kinds and value.lower() in ("none", "null")
    return value if str in parameter.kinds and not none else parse(parameter, value)


def typed_parameters(source: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `given` values or texts in the types that notebook `source` declares. Raises UsageError for others."""
    declared = parameters_of(source)
    for name in [name for name in given if name not in declared]:
        known = ", ".join(declared) or "none"
        raise UsageError(f'{source.name} has no parameter "{name}"{nearest(name, declared)}: it has {known}')
    try:
        return {name: typed_value(declared[name], value) for name, value in given.items()}
    except PlanError as error:
        raise UsageError(f"{source.name}: parameter {error}") from error
