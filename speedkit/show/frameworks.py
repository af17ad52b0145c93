"""A plan in the words of other frameworks: what to write there, where training is not left to speedkit.

The words are a table, `notebooks/frameworks.csv`, of torch 2.11, lightning 2.6, accelerate 1.15 and transformers 5.23.
NeMo's are overrides for the command line of its scripts, keys of the configuration files under
https://github.com/NVIDIA/NeMo/tree/main/examples/asr/conf.

A row holds a field and a value: its words are shown for a plan that has this value, even the default; without a value,
for any but the default and those that have rows of their own; with `*`, always. A cell is a statement of Python, in
which `{value}` and other fields of the plan are filled in. The last column is advice where a framework has no words.
"""

import ast
import csv
import math
from typing import Any

from speedkit.errors import PlanError
from speedkit.measure.provenance import notebooks_folder
from speedkit.plan import Plan
from speedkit.recipe import Recipe

FRAMEWORKS = ("PyTorch", "Lightning", "Accelerate", "Hugging Face", "NeMo")

# Fields that mean nothing where another field has this value.
IDLE = {
    "compile_scope": ("compile", "off"),
    "persistent_workers": ("workers", 0),
    "prefetch_factor": ("workers", 0),
    "worker_kind": ("workers", 0),
    "cache_of": ("cache", "off"),
    "cache_dtype": ("cache", "off"),
    "strategy": ("ranks", 1),
}


def read_table() -> list[dict[str, str]]:
    """Return the rows of the table; raises UsageError where there is no notebooks folder."""
    with (notebooks_folder() / "frameworks.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def in_words(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return, by framework, the lines that do there what an effective `plan` does here: Python, overrides for NeMo.

    They name your `model`, `dataset`, `loss_function` and `device`, a batch's `inputs` and `targets`, and the `blocks`
    that repeat in the model. Raises PlanError for a batch size that is still to be found.
    """
    if not isinstance(recipe.batch_size, int):
        raise PlanError("batch_size=auto has no words elsewhere: give the number that training with auto has found")
    micro_batch = plan.micro_batch if isinstance(plan.micro_batch, int) else recipe.batch_size
    sizes = {"batch_size": recipe.batch_size, "parts": math.ceil(recipe.batch_size / micro_batch)}

    lines: dict[str, list[str]] = {framework: [] for framework in FRAMEWORKS}
    advice: dict[str, list[str]] = {framework: [] for framework in FRAMEWORKS}
    for row in _rows_for(plan):
        field, value = row["field"], getattr(plan, row["field"])
        filled_in: dict[str, Any] = vars(plan) | sizes | {"value": value}
        for framework in FRAMEWORKS:
            if row[framework]:
                lines[framework].append(row[framework].format(**filled_in))
            elif row["otherwise"] and value != getattr(Plan(), field):
                advice[framework].append(f"# {field}={value}: {row['otherwise'].format(**filled_in)}")
    merged = {name: lines[name] if name == "NeMo" else merge_calls(lines[name]) for name in FRAMEWORKS}
    return {name: "".join(f"{line}\n" for line in merged[name] + advice[name]) for name in FRAMEWORKS}


def _rows_for(plan: Plan) -> list[dict[str, str]]:
    """Return the rows of the table that concern a plan, in the order of the table."""
    table = read_table()
    with_own_rows = {(row["field"], row["value"]) for row in table}
    rows = []
    for row in table:
        field, value = row["field"], getattr(plan, row["field"])
        other, means_nothing = IDLE.get(field, ("", None))
        if other and getattr(plan, other) == means_nothing:
            continue
        any_other_value = value != getattr(Plan(), field) and (field, str(value)) not in with_own_rows
        if row["value"] in ("*", str(value)) or (not row["value"] and any_other_value):
            rows.append(row)
    return rows


def merge_calls(lines: list[str]) -> list[str]:
    """Return lines in which calls of one function are a single call with the keywords of all, where the first was."""
    merged: list[str] = []
    calls: dict[str, tuple[int, ast.stmt, ast.Call]] = {}
    for line in lines:
        statement = ast.parse(line).body[0] if not line.startswith("#") else ast.Pass()
        call = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func)) in calls:
            place, first_statement, first_call = calls[name]
            first_call.keywords += call.keywords
            merged[place] = ast.unparse(first_statement)
            continue
        if isinstance(call, ast.Call):
            calls[name] = len(merged), statement, call
        merged.append(line)
    return merged
