"""What commands take and what typed words stand for; the commands on what training leaves: cache, deploy."""

import contextlib
import dataclasses
import functools
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speedkit.config import from_mapping, from_yaml, settings_of
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.plan import PRESETS, Plan
from speedkit.recipe import Recipe
from speedkit.workloads import load_workload

if TYPE_CHECKING:
    from torch import nn

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
    limit_s = from_mapping(Recipe, fields).max_duration_s  # what no recipe can be is said before any data is made
    workload = load_workload(name, max_duration_s=limit_s, **typed(values, *DATA))
    return workload, from_mapping(Recipe, dataclasses.asdict(workload.recipe) | fields)


def find_plan(word: str, values: Values, device: str = "auto") -> Plan:
    """Return the plan that a word or a YAML file names, with the fields that were typed."""
    if word in PRESETS:
        plan = PRESETS[word](this_machine(device))
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


def axis(word: str) -> tuple[str, list[str]]:
    """Return the name and the values in `name=value,value,...`."""
    name, _, values = word.partition("=")
    if not values:
        raise UsageError(f"--sweep {word!r} must read name=value,value,...")
    return name, values.split(",")


def together(*options: Callable) -> Callable:
    """Return a decorator that adds `options` to a command, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def fields_of(cls: type) -> Callable:
    """Return a decorator that adds an option for every field of the settings class `cls`."""
    options = []
    for name, setting in settings_of(cls).items():
        flag = "--" + name.replace("_", "-")
        text = f"{setting.help.rstrip('.')} ({'by workload' if cls is Recipe else str(setting.default).lower()})"
        if "boolean" in setting.kinds:
            options.append(click.option(f"{flag}/--no-{flag[2:]}", name, help=text, default=None))
        else:
            options.append(click.option(flag, name, help=text, metavar=setting.takes.upper()))
    return together(*options)


def time_option(name: str, default: str | None, text: str) -> Callable:
    """Return an option that takes a time, as `seconds` reads it."""
    return click.option(name, type=seconds, default=default, show_default=True, metavar="TIME", help=text)


workload_argument = click.argument("workload")
device_option = click.option("--device", default="auto", show_default=True, metavar="AUTO | CUDA | MPS | CPU")
plan_option = click.option("--plan", default="baseline", show_default=True, metavar="FILE | BASELINE | CAREFUL | FAST")
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON")
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=lambda: Path("runs", time.strftime("%Y%m%d-%H%M%S")),
    show_default="runs/<date>-<time>",
    help="folder for what the run leaves",
)
data_options = together(
    click.option("--data-dir", type=click.Path(), help="folder of your files; generated data without"),
    click.option("--labels", type=click.Path(), help="CSV of paths and labels, with a fold or split column or not"),
    click.option("--label-pattern", metavar="REGEX", help="group 1 of a file's name is its label"),
    click.option("--test-pattern", metavar="REGEX", help="files whose names match are the test set"),
    click.option("--size", metavar="TINY | SMALL | MEDIUM", help="size of the model"),
    click.option("--clips", type=int, help="how many files to generate where there is no data folder"),
)
run_options = together(  # of all commands that train
    data_options,
    out_option,
    device_option,
    click.option("--cache-dir", type=click.Path(), help="folder for cached features"),
    click.option("--resume", is_flag=True, help="go on with the run in --out"),
    fields_of(Recipe),
)


@click.command()
@click.argument("action", type=click.Choice(["build", "info", "verify", "repair"]))
@click.argument("folder", metavar="DIR")
@click.option("--workload", default="audio", show_default=True, help="to build for: audio, or package.module:function")
@data_options
@click.option("--of", "cache_of", metavar="FEATURES | WAVEFORM")
@click.option("--dtype", "cache_dtype", metavar="FLOAT32 | FLOAT16")
@click.option("--decoder", help="what reads audio files")
def cache(action: str, folder: str, workload: str, **values: Any) -> int:
    """Build, describe, verify or repair cached features. DIR is the folder that --cache-dir names.

    Exit code 1 when verify finds an entry that is not as it was written; repair forgets such entries.
    """
    from speedkit.data.cache import open_cache
    from speedkit.data.cache_files import describe_caches, verify_cache

    if action == "build":
        plan = from_mapping(Plan, {"cache": "disk"} | typed(values, *settings_of(Plan)))
        work, _ = find_workload(workload, values)
        built = open_cache(work, [*work.train, *work.test], plan, cache_dir=folder, progress=True)
        lines = [f"{built.folder}: {built.why}", *(f"left out: {path}: {why}" for path, why in built.bad.items())]
    elif action == "info":
        lines = describe_caches(folder)
    else:
        damaged = [": ".join(entry) for entry in verify_cache(folder, repair=action == "repair")]
        again = "; the next use computes them again" if action == "repair" else ""
        lines = [f"{len(damaged)} entries are not as they were written{again}", *damaged]
    click.echo("\n".join(lines))
    return 1 if action == "verify" and damaged else 0


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("workload", required=False)
@data_options
@out_option
@device_option
@click.option("--method", default="int8-dynamic", show_default=True, help="how weights are made small")
@click.option("--max-drop", default=0.01, show_default=True, help="what the metric may lose on the test set")
@click.option("--batch-size", default=64, show_default=True, type=click.IntRange(2), help="beside a single sample")
@click.option("--pairs", default=10, show_default=True, type=click.IntRange(4), help="windows of each model")
@click.option("--compile/--no-compile", "compiled", default=True, help="measure compiled models too")
def deploy(checkpoint: Path, workload: str | None, out: Path, **values: Any) -> None:
    """Make the trained model in CHECKPOINT small and fast: quantize, test and export it. WORKLOAD is found in it."""
    from speedkit.deploy import export

    work, model = read_trained(checkpoint, workload, {key: values.pop(key) for key in DATA})
    with warnings.catch_warnings(action="ignore"):  # export's and torchao's, of what they do themselves
        facts = export.deploy(work, model, out, **values)
    quality = "{metric} {before:.4f}, now {after:.4f} on {n} test items: a drop of {drop:.4f} ({low:.4f} to {high:.4f})"
    click.echo(quality.format(**facts["quality"]))
    click.echo("{size_bytes} bytes for {float32_size_bytes}; {quantized_share:.1%} has 8 bits".format(**facts))
    if layers := facts["left_in_float32"]:
        click.echo(f"left in float32, since a GPU refuses the INT8 product of their shapes: {', '.join(layers)}")
    for row in facts["measurements"]:
        click.echo("{name}: {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as {a}".format(**row))
    click.echo(f"{export.MODEL} and {export.FACTS} in {out}")


def read_trained(path: Path, workload: str | None, data: Values) -> tuple["Workload", "nn.Module"]:
    """Return the workload and the trained model of a checkpoint, named by its file or folder.

    Raises UsageError where there is none, or where it does not fit what is named.
    """
    from speedkit.train.checkpoint import NAME, read

    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}: speedkit train leaves one in its --out folder")
    try:
        state = read(path)
        job = state["job"]
    except Exception as error:  # torch raises whatever its unpickler does
        raise SpeedkitError(f"{path} cannot be read ({error}): take the one before it") from error
    work = load_workload(workload or job["workload"], max_duration_s=job.get("max_duration_s"), **data)
    model = work.model()
    if job["train_items"] == len(work.train):  # else what it is tested on may be what it was trained on
        with contextlib.suppress(RuntimeError):  # weights of other names or shapes
            model.load_state_dict(state["model"])
            return work, model
    what = f"workload {job['workload']} with {job['train_items']} training items"
    raise UsageError(f"{path} does not fit: it is of {what}; name that workload, its data and its --size")
