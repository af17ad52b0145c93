"""What the commands take: an option for every setting, data and folders, and the objects that the words stand for."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speedkit.elsewhere import FORMERLY
from speedkit.errors import UsageError
from speedkit.plan import PRESETS, Plan
from speedkit.recipe import Recipe
from speedkit.settings import Setting, described, from_mapping, from_yaml, parse

RECIPE = {about.name: about for about in described(Recipe)}
PLAN = {about.name: about for about in described(Plan)}
DATA = ("data_dir", "labels", "label_pattern", "test_pattern", "size", "clips")


def _adding(*added: Callable) -> Callable:
    """Return a decorator that adds options to a command, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(added), command)


def options(*tables: dict[str, Setting]) -> Callable:
    """Return a decorator that adds an option for every setting, with its meaning, unit and default as help."""
    added = []
    for name, about in (pair for table in tables for pair in table.items()):
        flag, unit = "--" + name.replace("_", "-"), f" [{about.unit}]" if about.unit else ""
        default = "by workload" if name in RECIPE else str(about.default).lower()
        text = f"{about.help}{unit} ({default})"
        added.append(
            click.option(f"{flag}/--no-{flag[2:]}", name, help=text, default=None)
            if bool in about.kinds
            else click.option(flag, name, help=text, metavar=about.takes.upper())
        )
    return _adding(*added)


data_options = _adding(
    click.option("--data-dir", type=click.Path(), help="folder of your files; generated data without"),
    click.option("--labels", type=click.Path(), help="CSV of paths and labels, with a fold or split column or not"),
    click.option("--label-pattern", metavar="REGEX", help="group 1 of the file name is the label"),
    click.option("--test-pattern", metavar="REGEX", help="file names that match are the test set"),
    click.option("--size", metavar="TINY | SMALL | MEDIUM", help="size of the model"),
    click.option("--clips", type=int, help="how many files to generate where there is no data folder"),
)
run_options = _adding(
    data_options,
    click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=lambda: Path("runs", time.strftime("%Y%m%d-%H%M%S")),
        show_default="runs/<date>-<time>",
        help="folder for what the run leaves",
    ),
    click.option("--device", default="auto", show_default=True, metavar="AUTO | CUDA | MPS | CPU"),
)
shared = _adding(  # the options of all commands that train
    run_options,
    click.option("--cache-dir", type=click.Path(), help="folder for cached features"),
    click.option("--resume", is_flag=True, help="go on with the run in --out"),
)

rank_options = _adding(  # beside --ranks and --strategy, which are the plan's
    click.option(
        "--nnodes",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="machines that share the ranks; the same command runs on each",
    ),
    click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where several machines meet: one of them"),
    click.option(
        "--max-restarts",
        type=click.IntRange(0),
        default=3,
        show_default=True,
        help="times that all ranks go on from the last checkpoint after one has died",
    ),
)


def given(values: dict[str, Any], table: dict[str, Setting]) -> dict[str, Any]:
    """Return the settings of `table` that were typed, parsed."""
    typed = {name: values[name] for name in table if values.get(name) is not None}
    return {name: parse(table[name], value) if isinstance(value, str) else value for name, value in typed.items()}


def the_workload(name: str, values: dict[str, Any]) -> tuple[Any, Recipe]:
    """Return the workload with the data that was named, and its recipe with the fields that were typed."""
    from speedkit.workloads import load_workload

    typed = given(values, RECIPE)
    if {"epochs", "steps"} & typed.keys():  # typing one of the two replaces the other
        typed = {"epochs": None, "steps": None} | typed
    limit_s = Recipe(**typed).max_duration_s  # what no recipe can be is said before any data is made
    workload = load_workload(name, max_duration_s=limit_s, **{key: values.get(key) for key in DATA})
    return workload, dataclasses.replace(workload.recipe, **typed)


def the_plan(word: str, values: dict[str, Any] | None = None, device: str = "auto") -> Plan:
    """Return the plan that a word or a YAML file names, with the fields that were typed."""
    from speedkit.hardware import this_machine

    if word in PRESETS:
        plan = PRESETS[word](this_machine(device))
    elif Path(word).exists() or word.endswith((".yaml", ".yml")):
        plan = from_yaml(Plan, word, FORMERLY)
    else:
        raise UsageError(f"there is no plan {word!r}: take {', '.join(PRESETS)}, or a YAML file")
    return from_mapping(Plan, dataclasses.asdict(plan) | given(values or {}, PLAN))


def seconds(word: str) -> float:
    """Return the seconds in `540`, `90s`, `9m` or `1h`."""
    found = re.fullmatch(r"(\d+\.?\d*)([smh]?)", word)
    if not found or not float(found[1]):
        raise UsageError(f"{word!r} is no time: write seconds, or 90s, 9m, 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def axis(word: str) -> tuple[str, list[str]]:
    """Return the name and the values in `name=value,value,...`."""
    name, _, listed = word.partition("=")
    if not listed:
        raise UsageError(f"--sweep {word!r} must read name=value,value,...")
    return name, listed.split(",")
