"""The options of the commands, and what was typed, as objects."""

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any

import click
import psutil
from click.core import ParameterSource

from speedkit.config import from_mapping, settings_of
from speedkit.errors import SpeedkitError, TooManyBad, UsageError
from speedkit.files import claim_folder, write_quarantine
from speedkit.lab.workloads import load_workload
from speedkit.machine import this_machine
from speedkit.plan import Plan, as_plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

Values = dict[str, Any]  # what was typed, by option


def seconds(word: str) -> float:
    """Return the seconds in `540`, `90s`, `9m` or `1h`."""
    parts = re.fullmatch(r"(\d+\.?\d*)([smh]?)", word)
    if not parts or not float(parts[1]):
        raise UsageError(f"{word!r} is no time: write seconds, or 90s, 9m, 1h")
    return float(parts[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[parts[2]]


def names_in(word: str) -> list[str]:
    """Return the names in `a,b,c`."""
    return word.split(",")


def folder_of_today() -> Path:
    """Return the folder of a run that begins now, of ranks the one of when torchrun began."""
    began_s = time.time()
    if "LOCAL_RANK" in os.environ:
        began_s = psutil.Process(os.getppid()).create_time()
    return Path("runs", time.strftime("%Y%m%d-%H%M%S", time.localtime(began_s)))


def field_options(cls: type) -> list[click.Parameter]:
    """Return an option for each field of the settings class `cls`."""
    options: list[click.Parameter] = []
    for name, setting in settings_of(cls).items():
        flag = name.replace("_", "-")
        spelling = f"--{flag}"
        if setting.takes == ("true | false",):
            spelling = f"--{flag}/--no-{flag}"
        default = str(setting.default).lower()
        if cls is Recipe:
            default = "by workload"
        text = f"{setting.help.rstrip('.')} ({default})"
        words = " | ".join(setting.takes).upper()
        options.append(click.Option([spelling, name], help=text, metavar=words, default=None))  # None: not typed
    return options


ABSOLUTE = click.Path(resolve_path=True)  # for tune.ipynb too, which runs in a folder of its own
WORKLOAD = click.Argument(["workload"])
SCRIPT_ARGUMENTS = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="")
WORKLOAD_OR_SCRIPT = (click.Argument(["workload"], metavar="WORKLOAD | SCRIPT"), SCRIPT_ARGUMENTS)
DEVICE = click.Option(
    ["--device"], default="auto", metavar="CUDA:1 | MPS | CPU", help="auto is the first GPU of CUDA_VISIBLE_DEVICES"
)
PLAN = click.Option(["--plan"], default="baseline", metavar="FILE | BASELINE | CAREFUL | FAST")
DEBUG = click.Option(["--debug"], is_flag=True, expose_value=False, help="show tracebacks")
JSON = click.Option(["--json", "as_json"], is_flag=True, help="print JSON")
OUT = click.Option(
    ["--out"],
    type=click.Path(path_type=Path),
    default=folder_of_today,
    show_default="runs/<date>-<time>",
    help="folder for what the run leaves",
)
DATA = (
    click.Option(["--data-dir"], type=ABSOLUTE, help="folder of your files, or 'clips-{00..09}.tar'; else generated"),
    click.Option(["--labels"], type=ABSOLUTE, help="CSV of paths and labels, with a fold or split column or not"),
    click.Option(["--label-pattern"], metavar="REGEX", help="group 1 of a file's name is its label"),
    click.Option(["--test-pattern"], metavar="REGEX", help="files whose names match are the test set"),
    click.Option(["--size"], metavar="TINY | SMALL | MEDIUM", help="size of the model"),
    click.Option(["--width"], type=int, help="channels of the model instead of its size's, of the first stage"),
    click.Option(["--depth"], type=int, help="residual blocks of the model instead of its size's, of each stage"),
    click.Option(
        ["--clips"], type=click.IntRange(1, 10_000_000), help="how many files to generate where there is no data folder"
    ),
)
DATA_FIELDS = [str(option.name) for option in DATA]
RUN = (  # of all commands that train
    *DATA,
    OUT,
    DEVICE,
    click.Option(["--cache-dir"], help="folder for cached features"),
    click.Option(["--resume"], is_flag=True, help="go on with the run in --out"),
    *field_options(Recipe),
)


class RunCommand(click.Command):
    """A command that lists the files that cannot be used in its --out, where they are too many to go on."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. A folder that another run has left stays as it is: this one would have been refused."""
        out: Any = ctx.params.get("out")
        ours = isinstance(out, Path) and (ctx.params["resume"] or not out.exists() or not any(out.iterdir()))
        try:
            return super().invoke(ctx)
        except TooManyBad as error:
            if not ours:
                raise
            table = claim_folder(out, str(ctx.info_name), resume=True) / "quarantine.csv"
            write_quarantine(table, error.bad)
            raise SpeedkitError(f"{error}; {table} lists all") from error


class WorkloadOrScript(RunCommand):
    """A command whose first argument is a workload, or a script that all arguments behind it belong to."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave what stands behind a script to the script."""
        ctx.allow_interspersed_args = False
        first = self.make_parser(ctx).parse_args(list(args))[0].get("workload")
        ctx.allow_interspersed_args = not str(first).endswith(".py")
        return super().parse_args(ctx, args)


def typed(values: Values, *names: str) -> Values:
    """Return those of `names` that were typed."""
    return {name: values[name] for name in names if values.get(name) is not None}


def recipe_fields(values: Values) -> Values:
    """Return the fields of the recipe that were typed; one of `epochs` and `steps` replaces the other."""
    fields = typed(values, *settings_of(Recipe))
    if {"epochs", "steps"} & fields.keys():
        return {"epochs": None, "steps": None} | fields
    return fields


def find_workload(name: str, values: Values) -> tuple[Workload, Recipe]:
    """Return the workload with the data that was named, and its recipe with the fields that were typed."""
    fields = recipe_fields(values)
    limit_s = from_mapping(Recipe, fields).max_duration_s  # an impossible recipe is refused before any data is made
    workload = load_workload(name, max_duration_s=limit_s, **typed(values, *DATA_FIELDS))
    return workload, from_mapping(Recipe, dataclasses.asdict(workload.recipe) | fields)


def find_plan(word: str, values: Values) -> Plan:
    """Return the plan that a word or a YAML file names, with the fields that were typed."""
    plan = as_plan(word, this_machine(values["device"]))
    return from_mapping(Plan, dataclasses.asdict(plan) | typed(values, *settings_of(Plan)))


def refuse_options_of_workloads(script: str | Path, *own: str) -> None:
    """Raise UsageError where an option was typed that a script does not have: `own` are those that it has."""
    for option in typed_options():
        if option.expose_value and option.name not in ("workload", "arguments", "out", *own):
            raise UsageError(f"{option.opts[0]} is for a workload, and {script} says what it trains: leave it out")


def refuse_words_of_scripts(arguments: tuple[str, ...], *names: str) -> None:
    """Raise UsageError where arguments follow a workload, or an option was typed that only a script has."""
    if arguments:
        raise UsageError(f"{arguments[0]!r} is one argument too many: only a script, NAME.py, has arguments of its own")
    for option in typed_options():
        if option.name in names:
            raise UsageError(f"{option.opts[0]} is for a script, NAME.py: leave it out")


def typed_options() -> list[click.Parameter]:
    """Return the options and arguments of this command that were typed."""
    context = click.get_current_context()
    source = context.get_parameter_source
    return [option for option in context.command.params if source(option.name or "") is ParameterSource.COMMANDLINE]
