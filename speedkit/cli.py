"""The command line: `speedkit hardware | train | doctor | climb | compare | cache | deploy | run | publish`."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import yaml

from speedkit.commands import (
    DATA,
    Values,
    axis,
    cache,
    deploy,
    device_option,
    fields_of,
    find_plan,
    find_workload,
    json_option,
    plan_option,
    run_options,
    time_option,
    typed,
    workload_argument,
)
from speedkit.config import RENAMED_OPTIONS
from speedkit.data.sources import write_quarantine
from speedkit.errors import Interrupted, PlanError, SpeedkitError, UsageError
from speedkit.files import claim_folder, write_json
from speedkit.hardware import this_machine
from speedkit.plan import Plan, resolve
from speedkit.train import distributed


def main() -> NoReturn:
    """Run the command line; every failure is one sentence and an exit code, a traceback only with --debug."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = commands.main(prog_name="speedkit", standalone_mode=False) or 0
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        code, sentence = explain(error)
        click.echo(f"speedkit: {' '.join(sentence.split())}", err=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python would print what is raised on its way out
    distributed.leave(code)


def _terminate(number: int, _frame: Any) -> NoReturn:
    # As an exception, so that loader processes are ended and half-written files removed on the way out.
    raise Interrupted("stopped by SIGTERM; what was complete is kept", number)


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the one sentence of a failure."""
    if isinstance(error, SpeedkitError):
        return error.exit_code, str(error)
    if isinstance(error, click.Abort):
        return 130, "stopped by SIGINT; what was complete is kept"
    if isinstance(error, click.ClickException):
        option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
        renamed = RENAMED_OPTIONS.get(option, "").replace("_", "-")
        return error.exit_code, error.format_message() + (f" Here that is --{renamed}" if renamed else "")
    return 1, f"{type(error).__name__}: {error} (--debug shows where)"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="speedkit")
def commands() -> None:
    """Make PyTorch training as fast as this machine allows, with proof."""


commands.add_command(cache)
commands.add_command(deploy)


@commands.command()
@json_option
@click.option("--refresh", is_flag=True, help="measure the ceilings anew")
@device_option
def hardware(as_json: bool, refresh: bool, device: str) -> None:
    """Show what this machine is, what it can do, and its measured ceilings."""
    from speedkit.ceilings import ceilings

    machine = this_machine(device)
    show = dataclasses.asdict if as_json else str
    facts = machine.as_dict() | {"ceilings": {name: show(found) for name, found in ceilings(machine, refresh).items()}}
    click.echo(json.dumps(facts, indent=1) if as_json else yaml.safe_dump(facts, sort_keys=False, width=1000))


@commands.command()
@workload_argument
@plan_option
@click.option("--strict", is_flag=True, help="a plan field that cannot be honoured here is an error")
@click.option("--deterministic", is_flag=True, help="reproducible kernels on CUDA too")
@click.option("--max-restarts", type=click.IntRange(0), default=3, show_default=True, help="after a rank has died")
@run_options
@fields_of(Plan)
def train(workload: str, plan: str, **values: Any) -> int:
    """Train WORKLOAD (audio, speech, image, text, or package.module:function) by a recipe, as fast as a plan says.

    With --ranks above 1 it starts as many processes, unless torchrun has started it as one of them, as it
    does on several machines.
    """
    from speedkit.measure.quality import choose_batch_size
    from speedkit.train.fit import fit

    asked = find_plan(plan, values, values["device"])
    resolve(asked, this_machine(values["device"]), values["strict"])  # before data is touched
    work, recipe = find_workload(workload, values)
    if asked.ranks > 1 and recipe.batch_size == "auto":
        raise PlanError("batch_size=auto trains on one rank: find the number with --ranks 1, and give it here")
    if asked.ranks > 1 and "WORLD_SIZE" not in os.environ:
        arguments = ["speedkit", *sys.argv[1:], "--out", str(values["out"])]
        return distributed.launch(arguments, asked.ranks, max_restarts=values["max_restarts"])
    if recipe.batch_size == "auto":
        recipe, _ = choose_batch_size(work, recipe, asked, say=click.echo, **typed(values, "device", "cache_dir"))
    options = typed(values, "device", "cache_dir", "out", "resume", "deterministic", "strict")
    history = fit(work, recipe, asked, **options)
    if os.environ.get("RANK", "0") == "0":
        result = history.evaluation
        score = f"{result['metric']} {result['value']:.4f} on {result['n']} test items; " if result else ""
        click.echo(f"{score}{history.steps} steps in {history.seconds:.1f} s; all else in {values['out']}")
    return 0


@commands.command()
@workload_argument
@time_option("--budget", "8m", "time for all of it")
@click.option("--rungs", metavar="NAME,NAME", help="only these rungs")
@click.option(
    "--seeds", type=click.IntRange(2), help="trainings of each plan, to test quality (3, and more if in doubt)"
)
@click.option(
    "--horizon", type=click.IntRange(1), metavar="STEPS", help="compiling has to pay by then (the recipe's end)"
)
@click.option("--notebook/--no-notebook", default=True, help="also write climb.ipynb")
@run_options
def climb(workload: str, budget: float, rungs: str | None, notebook: bool, **values: Any) -> None:
    """Climb the whole ladder on WORKLOAD; leave the winning plan, the record and a report."""
    from speedkit.climb import climb as climb_ladder
    from speedkit.show.report import write_report
    from speedkit.show.summary import in_short

    work, recipe = find_workload(workload, values)
    folder = values["out"]
    names = rungs.split(",") if rungs else None
    options = typed(values, "device", "cache_dir", "out", "resume", "seeds", "horizon")
    record = climb_ladder(work, recipe=recipe, budget_s=budget, rungs=names, **options)
    write_report(record, folder / "report.html")
    if notebook:
        _write_notebook(folder, {"workload": workload, "out": folder} | typed(values, *DATA))
    if work.quarantined:
        write_quarantine(folder / "quarantine.csv", work.quarantined)
        click.echo(f"files left out: {len(work.quarantined)} (quarantine.csv says why)")
    click.echo(f"plan.yaml, report.html, record.json{', climb.ipynb' if notebook else ''} in {folder}")
    click.echo("\n".join(in_short(record)))
    if record["quality"]["decision"] == "worse" and not record["quality"].get("replaced"):
        raise SpeedkitError("the final plan learns worse than plain PyTorch, and nothing can be taken out of it")


def _write_notebook(folder: Path, parameters: Values) -> None:
    """Show the finished climb in `folder` as an executed notebook."""
    from speedkit.notebooks import find_notebooks, run_notebook

    source, shown = find_notebooks(["90"])[0], folder / "climb.ipynb"
    environment = {"SPEEDKIT_RUN_DIR": str(folder.resolve())}
    run_notebook(source, shown, _absolute(parameters), environment=environment, progress=False)


def _absolute(parameters: Values) -> Values:
    """Return a notebook's parameters with absolute paths: it runs in a folder of its own."""
    paths = {key: str(Path(parameters[key]).resolve()) for key in ("data_dir", "labels", "out") if parameters.get(key)}
    return parameters | paths


@commands.command()
@workload_argument
@plan_option
@click.option("--trace", metavar="FILE", help="keep the profiler's trace, for ui.perfetto.dev")
@json_option
@run_options
@fields_of(Plan)
def doctor(workload: str, plan: str, as_json: bool, **values: Any) -> None:
    """Say why training WORKLOAD is slow: where a step's time goes, the causes, what to change, and what that gives."""
    from speedkit.measure import diagnose

    asked = find_plan(plan, values, values["device"])
    work, recipe = find_workload(workload, values)
    folder = claim_folder(values["out"], "doctor", values["resume"])
    options = typed(values, "device", "cache_dir", "trace")
    ledger = diagnose.diagnose(work, recipe, asked, **options)
    write_json(folder / "ledger.json", ledger)
    click.echo(json.dumps(ledger) if as_json else f"{diagnose.as_text(ledger)}\nledger.json in {folder}")


@commands.command()
@click.argument("plan_a")
@click.argument("plan_b")
@workload_argument
@click.option("--pairs", default=80, show_default=True, type=click.IntRange(4), help="turns of each plan, at most")
@json_option
@run_options
def compare(plan_a: str, plan_b: str, workload: str, as_json: bool, **values: Any) -> int:
    """Train WORKLOAD under two plans in turns. Exit code 1 when PLAN_B is shown to be faster: a gate for CI."""
    from speedkit.measure.compare import compare as compare_plans

    a, b = (find_plan(word, {}, values["device"]) for word in (plan_a, plan_b))
    work, recipe = find_workload(workload, values)
    options = typed(values, "device", "cache_dir", "pairs")
    comparison = compare_plans(work, a, b, recipe=recipe, names=(plan_a, plan_b), **options)
    click.echo(json.dumps(comparison.as_measurement()) if as_json else str(comparison))
    for name, effective in ((plan_a, comparison.effective_a), (plan_b, comparison.effective_b)):
        for fallback in effective.fallbacks:
            click.echo(f"  {name}: {fallback}", err=True)
    return 1 if comparison.faster else 0


@commands.command()
@click.argument("names", nargs=-1, required=True, metavar="NOTEBOOK...")
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter of the notebooks")
@click.option("--sweep", "grid", multiple=True, type=axis, metavar="NAME=A,B,C", help="run every combination of these")
@click.option("--out", default="runs/notebooks", show_default=True, type=click.Path(), help="folder for what was run")
@time_option("--timeout", "1h", "for each cell")
@click.option("--cluster", metavar="TCP://HOST:PORT", help="sweep on the Dask cluster of this scheduler")
def run(names: tuple[str, ...], out: str, timeout: float, cluster: str | None, **values: Any) -> None:
    """Run notebooks by number or name with parameters; a parameter that one does not declare is an error."""
    from speedkit import notebooks

    grid, parameters, failed = dict(values["grid"]), _absolute(dict(values["parameters"])), 0
    if cluster and not grid:
        raise UsageError("--cluster runs the combinations of --sweep NAME=A,B,C: give one")
    options: dict[str, Any] = {"parameters": parameters, "timeout_s": timeout}
    with notebooks.cluster_executor(cluster) if cluster else contextlib.nullcontext() as executor:
        for source in notebooks.find_notebooks(names):
            if grid:
                outcomes = notebooks.sweep(source, grid, out, executor=executor, **options)
                failed += sum(bool(why) for why in outcomes.values())
            else:
                click.echo(notebooks.run_notebook(source, Path(out) / source.name, **options))
    if failed:
        raise SpeedkitError(f"{failed} combinations failed; the others are in {out}")


@commands.command()
@click.argument("names", nargs=-1, metavar="[NOTEBOOK]...")
@click.option("--all", "everything", is_flag=True, help="every notebook")
@click.option("--out", type=click.Path(), help="folder to write to (the notebooks' own)")
@time_option("--budget", None, "start no notebook after this time")
@click.option("--workload", default="", help="write only the record, of this workload")
@click.option("--import", "source", type=click.Path(), help="take in what another machine published to this folder")
def publish(
    names: tuple[str, ...], everything: bool, out: str | None, budget: float | None, workload: str, source: str | None
) -> int:
    """Run notebooks here for the repository: executed notebooks and records, and the README's tables."""
    from speedkit import publishing

    if not (source or names or everything):
        raise UsageError("name notebooks to publish, or give --all or --import DIR")
    if source:
        outcomes = publishing.import_published(source)
    else:
        outcomes = publishing.publish(None if everything else names, out, budget, workload=workload)
    for outcome in outcomes:
        click.echo(f"{outcome.state}: {outcome.name} {outcome.why}".rstrip())
    if not out:
        publishing.update_readme(publishing.notebooks_folder().parent / "README.md")
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


# Known before and after every command; `main` looks for it where a run fails.
for command in (commands, *commands.commands.values()):
    command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="show tracebacks"))
