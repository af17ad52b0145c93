"""What the commands take: their options, and what typed words stand for."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speedkit.config import from_mapping, from_yaml, settings_of
from speedkit.errors import UsageError
from speedkit.hardware import this_machine
from speedkit.plan import PRESETS, Plan
from speedkit.recipe import Recipe
from speedkit.workloads import load_workload

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

Values = dict[str, Any]  # what was typed, by option
DATA = ("data_dir", "labels", "label_pattern", "test_pattern", "size", "clips")


def typed(values: Values, *names: str) -> Values:
    """Return those of `names` that were typed."""
    return {name: values[name] for name in names if values.get(name) is not None}


def find_workload(name: str, values: Values) -> tuple["Workload", Recipe]:
    """Return the workload with the data that was named, and its recipe with the fields that were typed."""
    fields = typed(values, *settings_of(Recipe))
    if {"epochs", "steps"} & fields.keys():  # typing one of the two replaces the other
        fields = {"epochs": None, "steps": None} | fields
    limit_s = from_mapping(Recipe, fields).max_duration_s  # an impossible recipe is refused before any data is made
    workload = load_workload(name, max_duration_s=limit_s, **typed(values, *DATA))
    return workload, from_mapping(Recipe, dataclasses.asdict(workload.recipe) | fields)


def find_plan(word: str, values: Values) -> Plan:
    """Return the plan that a word or a YAML file names, with the fields that were typed."""
    if word in PRESETS:
        plan = PRESETS[word](this_machine(values["device"]))
    elif Path(word).exists() or word.endswith((".yaml", ".yml")):
        plan = from_yaml(Plan, word)
    else:
        raise UsageError(f"there is no plan {word!r}: take {', '.join(PRESETS)}, or a YAML file")
    return from_mapping(Plan, dataclasses.asdict(plan) | typed(values, *settings_of(Plan)))


def seconds(word: str) -> float:
    """Return the seconds in `540`, `90s`, `9m` or `1h`."""
    parts = re.fullmatch(r"(\d+\.?\d*)([smh]?)", word)
    if not parts or not float(parts[1]):
        raise UsageError(f"{word!r} is no time: write seconds, or 90s, 9m, 1h")
    return float(parts[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[parts[2]]


def combined(*options: Callable) -> Callable:
    """Return a decorator that adds `options` to a command, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def fields_of(cls: type) -> Callable:
    """Return a decorator that adds an option for every field of the settings class `cls`."""
    options = []
    for name, setting in settings_of(cls).items():
        flag = name.replace("_", "-")
        text = f"{setting.help.rstrip('.')} ({'by workload' if cls is Recipe else str(setting.default).lower()})"
        if setting.takes == ("true | false",):
            options.append(click.option(f"--{flag}/--no-{flag}", name, help=text, default=None))
        else:
            options.append(click.option(f"--{flag}", name, help=text, metavar=" | ".join(setting.takes).upper()))
    return combined(*options)


workload_argument = click.argument("workload")
device_option = click.option("--device", default="auto", metavar="AUTO | CUDA | MPS | CPU")
plan_option = click.option("--plan", default="baseline", metavar="FILE | BASELINE | CAREFUL | FAST")
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON")
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=lambda: Path("runs", time.strftime("%Y%m%d-%H%M%S")),
    show_default="runs/<date>-<time>",
    help="folder for what the run leaves",
)
data_options = combined(
    click.option("--data-dir", help="folder of your files; generated data without"),
    click.option("--labels", help="CSV of paths and labels, with a fold or split column or not"),
    click.option("--label-pattern", metavar="REGEX", help="group 1 of a file's name is its label"),
    click.option("--test-pattern", metavar="REGEX", help="files whose names match are the test set"),
    click.option("--size", metavar="TINY | SMALL | MEDIUM", help="size of the model"),
    click.option("--clips", type=int, help="how many files to generate where there is no data folder"),
)
run_options = combined(  # of all commands that train
    data_options,
    out_option,
    device_option,
    click.option("--cache-dir", help="folder for cached features"),
    click.option("--resume", is_flag=True, help="go on with the run in --out"),
    fields_of(Recipe),
)
