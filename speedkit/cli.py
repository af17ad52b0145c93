"""The command line: `speedkit hardware | train | doctor | climb | deploy | compare | bench | run | publish`."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml

from speedkit.ceilings import ceilings, left_out
from speedkit.commands_cache import cache
from speedkit.commands_deploy import deploy
from speedkit.data.sources import write_quarantine
from speedkit.elsewhere import option_today
from speedkit.errors import Interrupted, PlanError, SpeedkitError, UsageError
from speedkit.files import claim_folder, write_json
from speedkit.hardware import this_machine
from speedkit.measure.compare import compare as compare_plans
from speedkit.measure.larger_batch import choose_batch_size
from speedkit.options import DATA, PLAN, RECIPE, axis, options, rank_options, seconds, shared, the_plan, the_workload
from speedkit.plan import resolve
from speedkit.train import distributed
from speedkit.train.loop import fit


def main() -> None:
    """Run the command line; every failure is one sentence and an exit code, a traceback only with --debug."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    signal.signal(signal.SIGTERM, _terminate)
    unraisable = sys.unraisablehook
    sys.unraisablehook = functools.partial(_lost, unraisable)
    try:
        sys.exit(commands.main(arguments, prog_name="speedkit", standalone_mode=False) or 0)
    except click.NoSuchOption as error:
        here = option_today(error.option_name)
        said = f"{error.option_name} is no option: here that is {here}" if here else error.format_message()
        click.echo(f"speedkit: {said}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        code, message = getattr(error, "exit_code", 1), str(error)
        if isinstance(error, click.exceptions.Abort):
            code, message = 130, "stopped by SIGINT; what was complete is kept"
        elif "--debug" in sys.argv:
            raise
        elif not isinstance(error, SpeedkitError):
            message = f"{type(error).__name__}: {error} (--debug shows where)"
        if not distributed.tell(message, code, hasattr(error, "lost")):
            click.echo(f"speedkit: {message}", err=True)
        sys.exit(code)
    finally:
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python would print what is raised on its way out


def _lost(otherwise: Callable[[Any], Any], what: Any) -> None:
    """Send the signal again that came while an object was deleted, where Python prints exceptions and goes on."""
    if isinstance(what.exc_value, Interrupted):
        again = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        again.daemon = True
        again.start()
    else:
        otherwise(what)


def _terminate(number: int, _frame: Any) -> None:
    # As an exception, so that loader processes are ended and half-written files removed on the way out.
    raise Interrupted("stopped by SIGTERM; what was complete is kept", number)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="speedkit")
def commands() -> None:
    """Make PyTorch training as fast as this machine allows, with proof. --debug shows tracebacks."""


commands.add_command(cache)
commands.add_command(deploy)


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--refresh", is_flag=True, help="measure the ceilings anew")
@click.option("--device", default="auto", show_default=True, metavar="AUTO | CUDA | MPS | CPU")
def hardware(as_json: bool, refresh: bool, device: str) -> None:
    """Show what this machine is, what it can do, and its measured ceilings."""
    machine = this_machine(device)
    found = ceilings(machine, refresh)
    facts = machine.as_dict() | {"ceilings": {}, "unmeasured": left_out(machine)}
    facts["ceilings"] = {name: dataclasses.asdict(row) if as_json else str(row) for name, row in found.items()}
    click.echo(json.dumps(facts, indent=1) if as_json else yaml.safe_dump(facts, sort_keys=False, width=1000))


@commands.command()
@click.argument("workload")
@shared
@click.option("--plan", "plan_name", default="baseline", show_default=True, metavar="FILE | BASELINE | CAREFUL | FAST")
@click.option("--strict", is_flag=True, help="a plan field that cannot be honoured here is an error")
@click.option("--deterministic", is_flag=True, help="reproducible kernels on CUDA too")
@rank_options
@options(RECIPE, PLAN)
def train(
    workload: str,
    plan_name: str,
    strict: bool,
    deterministic: bool,
    nnodes: int,
    rdzv_endpoint: str,
    max_restarts: int,
    **values: Any,
) -> int:
    """Train WORKLOAD (audio, speech, image, text, or package.module:function) by a recipe, as fast as a plan says.

    With --ranks above 1 it starts as many processes, unless torchrun has started it as one of them.
    """
    plan = the_plan(plan_name, values, values["device"])
    here = dataclasses.replace(plan, ranks=max(1, plan.ranks // nnodes))
    resolve(here, this_machine(values["device"]), strict)  # before data is touched
    work, recipe = the_workload(workload, values)
    if plan.ranks > 1:
        if recipe.batch_size == "auto":
            raise PlanError("batch_size=auto trains on one rank: find the number with --ranks 1, and give it here")
        if "WORLD_SIZE" not in os.environ:
            return distributed.launch(
                ["speedkit", *sys.argv[1:], "--out", str(values["out"])],
                plan.ranks,
                nnodes=nnodes,
                endpoint=rdzv_endpoint,
                max_restarts=max_restarts,
            )
    if recipe.batch_size == "auto":
        where = {"device": values["device"], "cache_dir": values["cache_dir"]}
        recipe, _ = choose_batch_size(work, recipe, plan, say=click.echo, **where)
    history = fit(
        work,
        recipe,
        plan,
        device=values["device"],
        out=values["out"],
        resume=values["resume"],
        cache_dir=values["cache_dir"],
        deterministic=deterministic,
        strict=strict,
    )
    if os.environ.get("RANK", "0") != "0" and plan.ranks > 1:
        return 0
    found = history.evaluation
    score = f"{found['metric']} {found['value']:.4f} on {found['n']} test items; " if found else ""
    click.echo(f"{score}{history.steps} steps in {history.seconds:.1f} s; history and checkpoint in {values['out']}")
    return 0


@commands.command()
@click.argument("workload")
@shared
@click.option(
    "--budget",
    "budget_s",
    default="8m",
    show_default=True,
    type=seconds,
    metavar="TIME",
    help="time for all of it: 480, 8m, 1h",
)
@click.option("--rungs", metavar="NAME,NAME", help="only these rungs")
@click.option("--seeds", type=click.IntRange(2), help="trainings of each plan, to test quality (5)")
@click.option("--notebook/--no-notebook", default=True, help="also write climb.ipynb and report.html")
@options(RECIPE)
def climb(workload: str, budget_s: float, rungs: str | None, seeds: int | None, notebook: bool, **values: Any) -> None:
    """Climb the whole ladder on WORKLOAD; leave the winning plan, the record and a report."""
    from speedkit.climb import climb as climb_ladder

    work, recipe = the_workload(workload, values)
    folder = values["out"]
    record = climb_ladder(
        work,
        recipe=recipe,
        device=values["device"],
        out=folder,
        resume=values["resume"],
        seeds=seeds,
        cache_dir=values["cache_dir"],
        budget_s=budget_s,
        rungs=rungs.split(",") if rungs else None,
    )
    if notebook:
        _write_report(folder, workload, values)
    if work.quarantined:
        write_quarantine(folder / "quarantine.csv", work.quarantined)
        click.echo(f"files left out: {len(work.quarantined)} (quarantine.csv says why)")
    click.echo(f"plan.yaml, record.json{', climb.ipynb, report.html' if notebook else ''} in {folder}")
    if not record["quality"]["passed"]:
        raise SpeedkitError("the final plan was not shown to be as good as the naive one: see quality in record.json")


def _write_report(folder: Path, workload: str, values: dict[str, Any]) -> None:
    """Show the finished climb in `folder` as an executed notebook and as one HTML file."""
    from speedkit.notebooks import find_notebooks, run_notebook
    from speedkit.show.report import report

    [source] = find_notebooks(["90"])
    parameters = {key: values[key] for key in DATA if values[key] is not None} | {"workload": workload, "out": folder}
    parameters = _found_from_anywhere(parameters)
    os.environ["SPEEDKIT_RUN_DIR"] = parameters["out"]
    report(
        run_notebook(source, folder / "climb.ipynb", parameters, timeout_s=600, progress=False), folder / "report.html"
    )


def _found_from_anywhere(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook's parameters with absolute paths: it runs in a folder of its own."""
    paths = {key: str(Path(parameters[key]).resolve()) for key in ("data_dir", "labels", "out") if parameters.get(key)}
    return parameters | paths


@commands.command()
@click.argument("workload")
@shared
@click.option("--plan", "plan_name", default="baseline", show_default=True, metavar="FILE | BASELINE | CAREFUL | FAST")
@click.option(
    "--budget",
    "budget_s",
    default="1m",
    show_default=True,
    type=seconds,
    metavar="TIME",
    help="what does not fit is left out, and said",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@options(RECIPE, PLAN)
def doctor(workload: str, plan_name: str, budget_s: float, as_json: bool, **values: Any) -> None:
    """Say why training WORKLOAD is slow: where a step's time goes, the causes, what to change, and what that gives."""
    from speedkit.measure import diagnose

    plan = the_plan(plan_name, values, values["device"])
    work, recipe = the_workload(workload, values)
    folder = claim_folder(values["out"], "doctor", values["resume"])
    where = {"device": values["device"], "cache_dir": values["cache_dir"]}
    found = diagnose.diagnose(work, recipe, plan, budget_s=budget_s, **where)
    write_json(folder / "ledger.json", found)
    click.echo(json.dumps(found) if as_json else f"{diagnose.as_text(found)}\nledger.json in {folder}")


@commands.command()
@click.argument("plan_a")
@click.argument("plan_b")
@click.argument("workload")
@shared
@click.option("--pairs", default=20, show_default=True, type=click.IntRange(4), help="windows of each plan")
@click.option("--window", default=0.25, show_default=True, type=float, help="length of a window [s]")
@click.option("--json", "as_json", is_flag=True, help="print the measurement as JSON")
@options(RECIPE)
def compare(plan_a: str, plan_b: str, workload: str, pairs: int, window: float, as_json: bool, **values: Any) -> int:
    """Train WORKLOAD under two plans in turns. Exit code 1 when PLAN_A is slower beyond the noise: a gate for CI."""
    a, b = (the_plan(word, None, values["device"]) for word in (plan_a, plan_b))
    work, recipe = the_workload(workload, values)
    found = compare_plans(
        work,
        a,
        b,
        recipe=recipe,
        device=values["device"],
        pairs=pairs,
        window_s=window,
        names=(plan_a, plan_b),
        cache_dir=values["cache_dir"],
    )
    click.echo(json.dumps(found.as_measurement()) if as_json else str(found))
    for name, effective in ((plan_a, found.effective_a), (plan_b, found.effective_b)):
        for fallback in effective.fallbacks:
            click.echo(f"  {name}: {fallback}", err=True)
    return 1 if found.faster else 0


@commands.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--json", "as_json", is_flag=True, help="print rows as JSON")
def bench(names: tuple[str, ...], as_json: bool) -> int:
    """Run benchmarks; a row each with its limit. Exit code 1 when a limit is not met."""
    from speedkit.measure import bench as benchmarks
    from speedkit.measure import bench_batch, bench_cache

    known = benchmarks.BENCHMARKS | bench_batch.BENCHMARKS | bench_cache.BENCHMARKS
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"there is no benchmark {unknown[0]!r}: take {', '.join(known)}")
    code = 0
    for name in names:
        for row in known[name]():
            click.echo(json.dumps(row) if as_json else benchmarks.line(row))
            code = code if row["passed"] else 1
    return code


@commands.command()
@click.argument("names", nargs=-1, required=True, metavar="NOTEBOOK...")
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter of the notebooks")
@click.option("--sweep", "grid", multiple=True, type=axis, metavar="NAME=A,B,C", help="run every combination of these")
@click.option("--out", default="runs/notebooks", show_default=True, type=click.Path(), help="folder for what was run")
@click.option("--timeout", default="1h", show_default=True, type=seconds, metavar="TIME", help="for each notebook")
@click.option("--cluster", metavar="TCP://HOST:PORT", help="sweep on the Dask cluster of this scheduler")
def run(names: tuple[str, ...], parameters: tuple, grid: tuple, out: str, timeout: float, cluster: str | None) -> None:
    """Run notebooks by number or name with parameters; a parameter that one does not declare is an error."""
    from speedkit import notebooks

    if cluster and not grid:
        raise UsageError("--cluster runs the combinations of --sweep NAME=A,B,C: give one")
    values, failed, sources = _found_from_anywhere(dict(parameters)), 0, notebooks.find_notebooks(names)
    with notebooks.cluster_executor(cluster) if cluster else contextlib.nullcontext() as executor:
        for source in sources:
            if grid:
                done = notebooks.sweep(source, dict(grid), out, parameters=values, executor=executor, timeout_s=timeout)
                failed += sum(map(bool, done.values()))
            else:
                click.echo(notebooks.run_notebook(source, Path(out) / source.name, values, timeout_s=timeout))
    if failed:
        raise SpeedkitError(f"{failed} combinations failed; the others are in {out}")


@commands.command()
@click.argument("names", nargs=-1, metavar="[NOTEBOOK]...")
@click.option("--all", "everything", is_flag=True, help="every notebook")
@click.option("--out", type=click.Path(), help="folder to write to (the notebooks' own)")
@click.option("--budget", type=seconds, metavar="TIME", help="start no notebook after this time")
@click.option("--workload", default="", help="write only the record, of this workload")
@click.option("--import", "source", type=click.Path(), help="take in what another machine published to this folder")
@click.option("--rehearse", is_flag=True, help="in the smoke profile; with --import, install nothing")
@click.option("--allow-changes", is_flag=True, help="publish from a package that differs from its last commit")
def publish(names, everything, out, budget, workload, source, rehearse, allow_changes) -> int:
    """Run notebooks here for the repository: executed notebooks and records, and the README's tables."""
    from speedkit import publishing

    if not (source or names or everything):
        raise UsageError("name notebooks to publish, or give --all or --import DIR")
    outcomes = (
        publishing.import_published(source, rehearse=rehearse)
        if source
        else publishing.publish(
            None if everything else names,
            out,
            budget,
            workload=workload,
            allow_changes=allow_changes,
            rehearse=rehearse,
        )
    )
    for outcome in outcomes:
        click.echo(f"{outcome.state}: {outcome.name}{': ' if outcome.why else ''}{outcome.why}")
    if not (out or rehearse):
        publishing.update_readme(publishing.notebooks_folder().parent / "README.md")
    return 1 if any(outcome.state in ("failed", "refused") for outcome in outcomes) else 0
