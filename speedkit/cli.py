"""The command line: `speedkit hardware | train | profile | tune | compare | dry-run | cache | run | lab | publish`."""

import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click
import psutil
import yaml
from click.core import ParameterSource

from speedkit import __version__
from speedkit.config import from_mapping, settings_of
from speedkit.ending import run_command, say
from speedkit.errors import SpeedkitError, UsageError
from speedkit.fallbacks import resolve
from speedkit.files import claim_folder, write_json, write_text
from speedkit.lab.launch import launch
from speedkit.lab.workloads.validation import hold_out
from speedkit.machine import this_machine
from speedkit.options import (
    DATA_FIELDS,
    DEBUG,
    DEVICE,
    JSON,
    OWN_GPU,
    PLAN,
    RUN,
    SHARE,
    WORKLOAD,
    RunCommand,
    Values,
    WorkloadOrScript,
    explained,
    field_options,
    find_plan,
    find_workload,
    names_in,
    seconds,
    typed,
)
from speedkit.plan import Plan, as_plan
from speedkit.recipe import Recipe
from speedkit.upkeep import cache, lab, publish, run

OF_SCRIPT = "of the script"  # what a script trains by, beside plans
RENDERING_S = 26.0  # of a tuning's budget, for report and notebook; with what came before a quarter of it at most


def main(command: click.Command | None = None, name: str = "speedkit") -> NoReturn:
    """Run the command line, or another `command`, and end this process."""
    run_command(command or commands, name)


def as_hyphens(word: str) -> str:
    """Return an option as it is spelled here, whose words others join by underscores."""
    return word.replace("_", "-")


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(context_settings={**CONTEXT, "token_normalize_func": as_hyphens})
@click.version_option(__version__)
def commands() -> None:
    """Make PyTorch training as fast as this machine allows, with proof."""


commands.command_class = RunCommand


@commands.command(params=[JSON, DEVICE])
def hardware(as_json: bool, device: str) -> None:
    """Show what this machine is, what it can do, and its measured peaks."""
    from speedkit.measure.peaks import peaks
    from speedkit.measure.profile_report import gpu_advice

    machine = this_machine(device)
    measured = peaks(machine)
    facts = machine.as_dict() | {"advice": gpu_advice(machine)}
    if as_json:
        facts["peaks"] = {name: dataclasses.asdict(peak) for name, peak in measured.items()}
        click.echo(json.dumps(facts, indent=1))
    else:
        facts["peaks"] = {name: str(peak) for name, peak in measured.items()}
        click.echo(yaml.safe_dump(facts, sort_keys=False, width=1000))


@commands.command(params=[WORKLOAD, PLAN, *RUN, *field_options(Plan)])
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


def warn_if_busy(device: str) -> None:
    """Say in a line that others use the cores too, and what fewer threads would give."""
    from speedkit.busy import advice

    if hint := advice(this_machine(device)):
        click.echo(hint, err=True)


@commands.command(cls=WorkloadOrScript, params=[*RUN])
@click.argument("workload", metavar="WORKLOAD | SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option("--budget", "budget_s", type=seconds, default="4m", metavar="TIME", help="time for all of it")
@click.option("--optimizations", type=names_in, metavar="NAME,NAME", help="only these")
@click.option("--seeds", type=click.IntRange(2), help="trainings of each plan, to test quality (3, more if in doubt)")
@click.option(
    "--horizon", type=click.IntRange(1), help="steps by which compiling has to pay (the recipe's; on a GPU 20000)"
)
@click.option("--notebook/--no-notebook", default=True, help="also write tune.ipynb")
@click.option("--keep", is_flag=True, help="let the SCRIPT save its weights, which a tuning leaves of no use")
def tune(workload: str, arguments: tuple[str, ...], notebook: bool, **values: Any) -> None:
    """Try every optimization on WORKLOAD and keep what is proven; leave the plan, the record and a report.

    Of a SCRIPT, whose name ends in .py, nothing is edited: what can be switched between two of its steps takes turns.
    The arguments behind it are its own.
    """
    if workload.endswith(".py"):
        tune_script(Path(workload), arguments, values)
        return
    refuse_arguments(arguments)
    refuse_options_of_scripts("keep")
    from speedkit.lab.frameworks import read_table
    from speedkit.lab.report import in_short, write_report
    from speedkit.lab.tuning import tune as tune_workload

    # What the report needs is there before the time is spent.
    read_table()
    written = "report.html, plan.yaml and record.json"
    if notebook:
        try:
            from speedkit.lab.notebooks import find_notebooks, run_notebook

            [source] = find_notebooks(["90"])
            written = f"tune.ipynb, {written}"
        except ModuleNotFoundError as error:
            say(f"no tune.ipynb: {explained(error)[1]}")
            notebook = False
    work, recipe = find_workload(workload, values)
    folder = values["out"]
    options = typed(values, "device", "cache_dir", "out", "resume", "budget_s", "optimizations", "seeds", "horizon")
    taken_s = time.time() - psutil.Process().create_time()  # by imports and by the data
    rest_s = min(taken_s + RENDERING_S, values["budget_s"] / 4)
    record = tune_workload(work, recipe=recipe, reserved_s=rest_s, **options)
    trained = typed(values, *DATA_FIELDS, *settings_of(Recipe), "device", "cache_dir")
    write_report(record, folder / "report.html", command=sys.argv[1:], workload=workload, options=trained)
    if notebook:
        out = str(folder.resolve())
        parameters = {"workload": workload, "out": out, **typed(values, *DATA_FIELDS)}
        run_notebook(
            source,
            folder / "tune.ipynb",
            parameters,
            environment={"SPEEDKIT_RUN_DIR": out},
            folder=Path.cwd(),
            progress=False,
        )
    click.echo(f"{written} are in {folder}")
    click.echo("\n".join(in_short(record)))
    if record["quality"]["decision"] == "worse":
        raise SpeedkitError("the final plan learns worse than plain PyTorch, and nothing can be taken out of it")


def tune_script(script: Path, arguments: tuple[str, ...], values: Values) -> None:
    """Tune a script. Raises UsageError for an option that only a workload has."""
    from speedkit.lab.script import tune as tuning

    refuse_options_of_workloads(script, "budget_s", "steps", "keep")
    steps = None
    if values["steps"] is not None:
        steps = from_mapping(Recipe, {"epochs": None, "steps": values["steps"]}).steps
    tuning.tune_script(script, arguments, values["out"], budget_s=values["budget_s"], steps=steps, keep=values["keep"])


@commands.command(cls=WorkloadOrScript, params=[PLAN, *RUN, *field_options(Plan)])
@click.argument("workload", metavar="WORKLOAD | SCRIPT", default="")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option("--trace", metavar="FILE", help="keep the profiler's trace, for ui.perfetto.dev")
@click.option("--read-trace", metavar="FILE", help="profile nothing: read what torch.profiler wrote, anywhere")
@click.option("--against", type=click.Path(path_type=Path), help="an older breakdown.json, to see what has changed")
@click.option("--stop", is_flag=True, help="end the SCRIPT once there is an answer, within 30 s of its first step")
@click.option("--hang", default="120s", type=seconds, help="time without a step after which it is told where SCRIPT is")
def profile(workload: str, arguments: tuple[str, ...], plan: str, **values: Any) -> None:
    """Say why training is slow, what to change, and what that gives: of a WORKLOAD, a function, or a SCRIPT.

    A function is package.module:function, of a workload or of (model, batch). A script, whose name ends in .py, runs
    as it is with the arguments behind it, in plain PyTorch, Lightning, Accelerate or the Hugging Face Trainer.
    """
    if workload.endswith(".py"):
        profile_script(Path(workload), arguments, values)
        return
    from speedkit.lab.script.profile import next_levers
    from speedkit.measure.profile_report import as_text, difference, profile_trace, profile_workload, read_breakdown

    against = read_breakdown(values["against"])
    read_trace = values["read_trace"]
    if (read_trace is None) == (not workload):
        raise UsageError("name a WORKLOAD, a SCRIPT or --read-trace FILE, one of them")
    refuse_arguments(arguments)
    if read_trace is not None:
        breakdown = profile_trace(Path(read_trace))
        folder = claim_folder(values["out"], "profile")
    else:
        asked = find_plan(plan, values)
        work, recipe = find_workload(workload, values)
        folder = claim_folder(values["out"], "profile", values["resume"])
        warn_if_busy(values["device"])
        breakdown = profile_workload(work, recipe, asked, **typed(values, "device", "cache_dir", "trace"))
    write_json(folder / "breakdown.json", breakdown)
    click.echo(as_text(breakdown))
    if read_trace is None and not breakdown["bottlenecks"]:
        click.echo(next_levers(asked, breakdown["rows"], values["device"]))
    if against is not None:
        click.echo(difference(against, breakdown))
    click.echo(f"breakdown.json in {folder}")


def profile_script(script: Path, arguments: tuple[str, ...], values: Values) -> None:
    """Profile a script. Raises UsageError for an option that only a workload has."""
    from speedkit.lab.script import profile as scripts
    from speedkit.measure.profile_report import read_breakdown

    refuse_options_of_workloads(script, "stop", "hang", "against")
    scripts.profile_script(
        script,
        arguments,
        values["out"],
        stop=values["stop"],
        hang_s=values["hang"],
        against=read_breakdown(values["against"]),
    )


def refuse_options_of_workloads(script: str | Path, *own: str) -> None:
    """Raise UsageError where an option was typed that a script does not have: `own` are those that it has."""
    for option in typed_options():
        if option.expose_value and option.name not in ("workload", "arguments", "out", *own):
            raise UsageError(f"{option.opts[0]} is for a workload, and {script} says what it trains: leave it out")


def refuse_options_of_scripts(*names: str) -> None:
    """Raise UsageError where an option was typed that only a script has: one of `names`."""
    for option in typed_options():
        if option.name in names:
            raise UsageError(f"{option.opts[0]} is for a script, NAME.py: leave it out")


def typed_options() -> list[click.Parameter]:
    """Return the options and arguments of this command that were typed."""
    context = click.get_current_context()
    sources = {option: context.get_parameter_source(option.name or "") for option in context.command.params}
    return [option for option, source in sources.items() if source is ParameterSource.COMMANDLINE]


def refuse_arguments(arguments: tuple[str, ...]) -> None:
    """Raise UsageError for arguments behind a workload."""
    if arguments:
        raise UsageError(f"{arguments[0]!r} is one argument too many: only a script, NAME.py, has arguments of its own")


@commands.command(params=[click.Argument(["plan_a"]), click.Argument(["plan_b"]), WORKLOAD, JSON, *RUN])
@click.option("--pairs", default=80, type=click.IntRange(4), help="turns of each plan, at most")
def compare(plan_a: str, plan_b: str, workload: str, **values: Any) -> int:
    """Train WORKLOAD under two plans in turns. Exit code 1 when PLAN_B is shown to be faster: a gate for CI."""
    from speedkit.measure.compare import compare as compare_plans

    a = find_plan(plan_a, values)
    b = find_plan(plan_b, values)
    work, recipe = find_workload(workload, values)
    options = typed(values, "device", "cache_dir", "pairs")
    comparison = compare_plans(work, a, b, recipe=recipe, names=(plan_a, plan_b), **options)
    if values["as_json"]:
        click.echo(json.dumps(comparison.as_measurement()))
    else:
        click.echo(str(comparison))
    for name, effective in ((plan_a, comparison.effective_a), (plan_b, comparison.effective_b)):
        for fallback in effective.fallbacks:
            click.echo(f"  {name}: {fallback}", err=True)
    return 1 if comparison.faster else 0


@commands.command("dry-run", cls=WorkloadOrScript, params=[JSON, *RUN, *OWN_GPU])
@click.argument("workload", metavar="WORKLOAD | SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option("--gpu", "gpus", type=names_in, default="H100", metavar="T4,RTX4090,H100", help="GPUs, by short names")
@click.option("--plan", default="fast", metavar="FILE | CAREFUL | FAST", help="beside the baseline")
def dry_run(workload: str, arguments: tuple[str, ...], gpus: list[str], **values: Any) -> None:
    """Say what training takes on GPUs that are not here: memory and launches counted, time predicted.

    Of a WORKLOAD, a function package.module:function, or a SCRIPT, whose name ends in .py: the arguments behind it are
    its own, and it runs until a step was counted.
    """
    from speedkit.dry import dry_run as dry
    from speedkit.dry.gpus import chosen_gpus
    from speedkit.lab.script.dry import dry_run_script
    from speedkit.lab.script.run import check_script

    chosen = chosen_gpus(gpus, typed(values, "sm", "memory", "bandwidth", "tflops"))
    if workload.endswith(".py"):
        refuse_options_of_workloads(workload, "gpus", "as_json", "sm", "memory", "bandwidth", "tflops")
        check_script(Path(workload))
        find = functools.partial(dry_run_script, Path(workload), arguments)
        rows = dry.dry_runs(workload, find, [OF_SCRIPT], gpus=chosen, tell=say)
    else:
        refuse_arguments(arguments)
        plan = values["plan"]
        as_plan(plan)  # a word that names no plan is refused before anything is counted
        work, recipe = find_workload(workload, values)
        find = functools.partial(dry.dry_run, work, recipe=recipe)
        rows = dry.dry_runs(work.name, find, ["baseline", plan], gpus=chosen, tell=say)
    folder = claim_folder(values["out"], "dry-run")
    write_json(folder / "dry-run.json", rows)
    write_text(folder / "dry-run.html", dry.as_page(rows))
    click.echo(json.dumps(rows) if values["as_json"] else dry.as_page(rows, "text.j2"))


for beside in (cache, run, lab, publish):
    commands.add_command(beside)
# Known before and after every command; `run_command` looks for it where a run fails. publish hands it on.
for command in (commands, *commands.commands.values()):
    if command is not publish:
        command.params.append(DEBUG)
