"""Reading a notebook without running it: its record, what it lets you set, and values checked against that."""

import ast
import io
import math
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from speedkit.errors import UsageError

TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
RECORD_MIME = "application/vnd.speedkit.record+json"
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


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


def record_of(notebook: Any) -> dict[str, Any] | None:
    """Return the record that an executed notebook carries, as its last `run.save()` displayed it; None without one."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    records = [output.data[RECORD_MIME] for output in outputs if RECORD_MIME in output.get("data", {})]
    return records[-1] if records else None


def parameters_of(path: Path) -> dict[str, Parameter]:
    """Return what the notebook at `path` lets you set. Raises UsageError when its parameters cell is not in order."""
    tagged = [cell for cell in read_notebook(path).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UsageError(f"{Path(path).name} has {len(tagged)} cells tagged `parameters`, and needs exactly one")
    try:
        return parse_parameters(tagged[0].source)
    except ValueError as error:
        raise UsageError(f"{Path(path).name}, parameters cell: {error}") from error


def parse_parameters(source: str) -> dict[str, Parameter]:
    """Return the parameters that a cell's `source` declares: annotated literals, one per line, a comment each.

    Raises ValueError, which says the line, for anything else.
    """
    parameters: dict[str, Parameter] = {}
    try:
        statements = ast.parse(source).body
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"not Python ({error})") from error
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    for statement in statements:
        line = f'line {statement.lineno} "{source.splitlines()[statement.lineno - 1].strip()}"'
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            raise ValueError(f"{line} is not `name: type = value  # comment`")
        kinds = [kind.strip() for kind in ast.unparse(statement.annotation).split("|")]
        optional = "None" in kinds
        kinds = [kind for kind in kinds if kind != "None"]
        if len(kinds) != 1 or not re.fullmatch(r"(int|float|str|bool)|list\[(int|float|str|bool)\]", kinds[0]):
            raise ValueError(f"{line}: the type must be int, float, str, bool, a list of one of them, or one `| None`")
        try:
            default = ast.literal_eval(statement.value) if statement.value else ...
        except ValueError:
            default = ...
        comment = comments.get(statement.lineno, "")
        if default is ... or not comment or statement.lineno != statement.end_lineno:
            raise ValueError(f"{line} needs a literal value and a comment, on one line")
        choices = re.match(r"[\w.+-]+(\s*\|\s*[\w.+-]+)+", comment) if kinds[0] == "str" else None
        named = tuple(choice.strip() for choice in choices[0].split("|")) if choices else ()
        parameter = Parameter(statement.target.id, kinds[0], optional, default, comment, named)
        if parameter.name in parameters:
            raise ValueError(f"{line} declares {parameter.name} a second time")
        if not isinstance(default, list | type(None)) and isinstance(default, str) != (kinds[0] == "str"):
            raise ValueError(f"{line}: the value is not of the type")
        typed_value(parameter, default)
        parameters[parameter.name] = parameter
    return parameters


def typed_value(parameter: Parameter, value: Any) -> Any:
    """Return `value`, or what the text `value` means, in the parameter's type. Raises ValueError when it cannot be."""
    wanted = parameter.type + (" or None" if parameter.optional else "")
    if parameter.optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    if parameter.type.startswith("list["):
        items = [item for item in value.strip("[] ").split(",") if item.strip()] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError(f"{parameter.name}={value!r} must be {wanted}")
        each = Parameter(parameter.name, parameter.type[5:-1], False, None, "", ())
        return [typed_value(each, item.strip(" '\"") if isinstance(item, str) else item) for item in items]
    kind = TYPES[parameter.type]
    if isinstance(value, str) and kind is not str:
        try:
            value = WORDS[value.strip().lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            raise ValueError(f'{parameter.name} must be {wanted}, not "{value}"') from None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{parameter.name} must be {wanted}, not {value!r}")
    if parameter.choices and value not in parameter.choices:
        near = get_close_matches(value, parameter.choices, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'{parameter.name} must be one of {", ".join(parameter.choices)}, not "{value}"{hint}')
    return value


def typed_parameters(source: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `given` values, or the texts of a command line, in the types that notebook `source` declares.

    Raises UsageError for a name that it does not declare or a value that does not fit.
    """
    declared = parameters_of(source)
    values = {}
    for name, value in given.items():
        if name not in declared:
            near = get_close_matches(name, declared, n=1, cutoff=0.3)
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise UsageError(f'{source.name} has no parameter "{name}": {hint}It has {", ".join(declared) or "none"}')
        try:
            values[name] = typed_value(declared[name], value)
        except ValueError as error:
            raise UsageError(f"{source.name}: parameter {error}") from error
    return values
