"""A plan in the words of other frameworks: what to write there, where training is not left to speedkit.

The words are a table, `frameworks.csv`, of torch 2.11, lightning 2.6, accelerate 1.15 and transformers 5.23.
NeMo's are overrides for the command line of its scripts, keys of the configuration files under
https://github.com/NVIDIA/NeMo/tree/main/examples/asr/conf.

A row holds a field and a value, or a pattern of values: its words are shown for a plan that has such a value, even the
default; without one, for any but the default and those that have rows of their own. The field means something only
where the field in `needs` is not at its default. A cell is a statement of Python, in which `{value}` and other fields
of the plan are filled in. The last column is advice where a framework has no words.
"""

import csv
import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from speedkit.config import from_mapping
from speedkit.plan import Plan
from speedkit.recipe import Recipe

FRAMEWORKS = ("PyTorch", "Lightning", "Accelerate", "Hugging Face", "NeMo")
# A cache in plain PyTorch: `{kept}` in the table.
KEPT = """\
class Kept(torch.utils.data.Dataset):  # makes each sample once: what is random comes after it
    def __init__(self, dataset):
        self.dataset = dataset
        self.samples = {}
    def __len__(self):
        return len(self.dataset)
    def __getitem__(self, index):
        if index not in self.samples:
            self.samples[index] = self.dataset[index]
        return self.samples[index]
dataset = Kept(dataset)"""
# A call, up to its keywords; and these.
CHANGE = re.compile(r"(\w+)=([\w.-]+)")
CALL = re.compile(r"(\w+ = [\w.]+\((?:dataset, |model\.parameters\(\), )?)(\w+=.*)\)")


def in_words(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return, by framework, the lines that do there what an effective `plan` does here: Python, overrides for NeMo.

    They name your `model`, `dataset`, `loss_function` and `device`, a batch's `inputs` and `targets`, and the `blocks`
    that repeat in the model.
    """
    parts = 1
    if isinstance(plan.micro_batch, int):
        parts = math.ceil(recipe.batch_size / plan.micro_batch)
    values = vars(plan) | {"batch_size": recipe.batch_size, "parts": parts, "kept": KEPT}
    changed = {field for field, value in vars(plan).items() if value != getattr(Plan(), field)}
    rows = rows_for(plan, changed)
    words = {}
    for framework in FRAMEWORKS:
        lines = []
        advice = []
        for row in rows:
            filled_in = values | {"value": values[row["field"]]}
            if row[framework]:
                lines.append(row[framework].format(**filled_in))
            elif row["otherwise"] and changed & {row["field"], row["needs"]}:
                advice.append(f"# {row['field']}={filled_in['value']}: {row['otherwise'].format(**filled_in)}")
        words[framework] = "".join(f"{line}\n" for line in merge_calls(lines) + advice)
    return words


def change_in_words(change: str, framework: str) -> str:
    """Return what a framework calls a `change`, `field=value, ...`; "" where that is no field of a plan."""
    fields = {field: value for field, value in CHANGE.findall(change) if field in vars(Plan())}
    return "; ".join(words_of(fields, framework, advice="", kept="keep each sample that was made"))


def lines_of(fields: dict[str, Any], framework: str) -> list[str]:
    """Return the lines that do in a framework what changed `fields` of a plan do, or one that no plan has."""
    lines = merge_calls(words_of(fields, framework, advice="# ", kept=KEPT))
    if fields.get("set_to_none"):
        lines.append("optimizer.zero_grad(set_to_none=True)")
    return [line for words in lines for line in words.splitlines()]


def words_of(fields: dict[str, Any], framework: str, *, advice: str, kept: str) -> list[str]:
    """Return a framework's words for `fields`, or advice, which begins with `advice`; `kept` are those of a cache."""
    plan = from_mapping(Plan, {field: value for field, value in fields.items() if field in vars(Plan())})
    words = []
    for row in rows_for(plan, set(fields)):
        word = row[framework] or (row["otherwise"] and advice + row["otherwise"])
        if word and (row["field"] in fields or row["needs"] in fields):
            words.append(word.format(**vars(plan), value=getattr(plan, row["field"]), kept=kept))
    return words


def read_table() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with Path(__file__).with_name("frameworks.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def rows_for(plan: Plan, changed: set[str]) -> list[dict[str, str]]:
    """Return the rows of the table that concern a plan in which some fields are `changed`, in the table's order."""
    rows = []
    matched = set()  # fields with a row for their value, which stands before the one for any other
    for row in read_table():
        field = row["field"]
        if fnmatchcase(str(getattr(plan, field)), row["value"]):
            matched.add(field)
        elif row["value"] or field in matched or field not in changed:
            continue
        if row["needs"] in ("", *changed):
            rows.append(row)
    return rows


def merge_calls(lines: list[str]) -> list[str]:
    """Return lines in which calls of one function are a single call with the keywords of all, where the first was."""
    calls: dict[str, list[str]] = {}
    for line in lines:
        if call := CALL.fullmatch(line):
            calls.setdefault(call[1], []).append(call[2])
        else:
            calls[line] = []
    return [f"{start}{', '.join(keywords)})" if keywords else start for start, keywords in calls.items()]
