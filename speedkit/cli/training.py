"""The commands `train`, for a trained model, and `tune`, for the plan to train it by."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import psutil

from speedkit.cli.ending import explained, say
from speedkit.cli.options import (
    DATA_FIELDS,
    PLAN,
    RUN,
    WORKLOAD,
    WORKLOAD_OR_SCRIPT,
    RunCommand,
    Values,
    WorkloadOrScript,
    field_options,
    find_plan,
    find_workload,
    names_in,
    recipe_fields,
    refuse_options_of_workloads,
    refuse_words_of_scripts,
    seconds,
    typed,
)
from speedkit.config import from_mapping, settings_of
from speedkit.errors import SpeedkitError
from speedkit.fallbacks import resolve
from speedkit.lab.launch import launch
from speedkit.lab.workloads.validation import hold_out
from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe

BUDGET_HELP = "time for all of it (4m, 6m for speech; for a WORKLOAD up to twice as long where others use the cores)"
RENDERING_S = 26.0  # of a tuning's budget, for report and notebook; with what came before a quarter of it at most
SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(cls=RunCommand, params=[WORKLOAD, PLAN, *RUN, *field_options(Plan)])
@click.option("--strict", is_flag=True, help="a plan field that cannot be honoured here is an error")
@click.option("--validation", type=SHARE, help="share of the training set to hold out as a validation set")
@click.option("--verbose", is_flag=True, help="say why of each field that falls back, however many they are")
@click.option("--deterministic", is_flag=True, help="reproducible kernels on CUDA too")
def train(workload: str, plan: str, **values: Any) -> int:
    """Train WORKLOAD (audio, speech, image, text, or package.module:function) by a recipe, as fast as a plan says."""
    from speedkit.train.fit import fit

    asked = find_plan(plan, values)
    resolve(asked, this_machine(values["device"]), values["strict"])  # before data is touched
    work, recipe = find_workload(workload, values)
    if values["validation"]:
        work = hold_out(work, values["validation"])
    if asked.ranks > 1 and "WORLD_SIZE" not in os.environ:
        return launch(["speedkit", *sys.argv[1:], "--out", str(values["out"])], asked.ranks)
    options = typed(values, "device", "cache_dir", "out", "resume", "deterministic", "strict", "verbose")
    history = fit(work, recipe, asked, **options)
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"{history.steps} steps in {history.seconds:.1f} s; all else in {values['out']}")
    return 0


@click.command(cls=WorkloadOrScript, params=[*WORKLOAD_OR_SCRIPT, *RUN])
@click.option("--budget", "budget_s", type=seconds, metavar="TIME", help=BUDGET_HELP)
@click.option("--optimizations", type=names_in, metavar="NAME,NAME", help="only these")
@click.option("--seeds", type=click.IntRange(2), help="trainings of each plan, to test quality (3, more if in doubt)")
@click.option(
    "--horizon", type=click.IntRange(1), help="steps by which compiling has to pay (the recipe's; on a GPU 20000)"
)
@click.option("--notebook/--no-notebook", default=True, help="also write tune.ipynb")
@click.option("--keep", is_flag=True, help="let the SCRIPT save its weights, which a tuning leaves of no use")
def tune(workload: str, arguments: tuple[str, ...], **values: Any) -> None:
    """Try every optimization on WORKLOAD and keep what is proven; leave the plan, the record and a report.

    Of a SCRIPT, whose name ends in .py, nothing is edited: what can be switched between two of its steps takes turns.
    The arguments behind it are its own.
    """
    if workload.endswith(".py"):
        tune_script(Path(workload), arguments, values)
    else:
        refuse_words_of_scripts(arguments, "keep")
        tune_workload(workload, values)


def tune_workload(workload: str, values: Values) -> None:
    """Tune a workload. Raises SpeedkitError where the plan learns worse than plain PyTorch."""
    from speedkit.lab.frameworks import read_table
    from speedkit.lab.report import in_short, write_report
    from speedkit.lab.tuning import tune as find_fastest_plan
    from speedkit.lab.tuning import usual_budget_s

    # What the report needs is there before the time is spent.
    read_table()
    source = notebook_of_tuning() if values["notebook"] else None
    work, recipe = find_workload(workload, values)
    folder = values["out"]
    options = typed(values, "device", "cache_dir", "out", "resume", "optimizations", "seeds", "horizon")
    budget_s = values["budget_s"] or usual_budget_s(this_machine(values["device"]), work.name)
    taken_s = time.time() - psutil.Process().create_time()  # by imports and by the data
    rest_s = min(taken_s + RENDERING_S, budget_s / 4)
    record = find_fastest_plan(work, recipe=recipe, budget_s=budget_s, reserved_s=rest_s, **options)
    trained = typed(values, *DATA_FIELDS, *settings_of(Recipe), "device", "cache_dir")
    write_report(record, folder / "report.html", command=sys.argv[1:], workload=workload, options=trained)
    written = "report.html, plan.yaml and record.json"
    if source:
        from speedkit.lab.notebooks import run_notebook

        out = str(folder.resolve())
        run_notebook(
            source,
            folder / "tune.ipynb",
            {"workload": workload, "out": out, **typed(values, *DATA_FIELDS)},
            environment={"SPEEDKIT_RUN_DIR": out},
            folder=Path.cwd(),
            progress=False,
        )
        written = f"tune.ipynb, {written}"
    click.echo(f"{written} are in {folder}")
    click.echo("\n".join(in_short(record)))
    if record["quality"]["decision"] == "worse":
        raise SpeedkitError("the final plan learns worse than plain PyTorch, and nothing can be taken out of it")


def notebook_of_tuning() -> Path | None:
    """Return the notebook that shows a tuning; say why, and return None, where nothing here can run it."""
    try:
        from speedkit.lab.notebooks import find_notebooks
    except ModuleNotFoundError as error:
        say(f"no tune.ipynb: {explained(error)[1]}")
        return None
    return find_notebooks(["90"])[0]


def tune_script(script: Path, arguments: tuple[str, ...], values: Values) -> None:
    """Tune a script. Raises UsageError for an option that only a workload has."""
    from speedkit.lab.script import tune as tuning
    from speedkit.lab.tuning import BUDGET_S

    refuse_options_of_workloads(script, "budget_s", "steps", "keep")
    steps = from_mapping(Recipe, recipe_fields(values)).steps
    budget_s = values["budget_s"] or BUDGET_S
    tuning.tune_script(script, arguments, values["out"], budget_s=budget_s, steps=steps, keep=values["keep"])
