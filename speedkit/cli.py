"""The command line: `speedkit hardware | train | doctor | watch | climb | compare | cache | deploy | run | publish`."""

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import click
import yaml

from speedkit import __version__
from speedkit.config import spelling_of_today
from speedkit.data.sources import write_quarantine
from speedkit.errors import Interrupted, PlanError, SpeedkitError, UsageError, missing_extra
from speedkit.files import claim_folder, write_json
from speedkit.hardware import cache_root, this_machine
from speedkit.measure.provenance import PACKAGE, notebooks_folder
from speedkit.options import (
    DATA,
    DATA_FIELDS,
    DEVICE,
    JSON,
    OUT,
    PLAN,
    RUN,
    SHARE,
    WORKLOAD,
    Values,
    field_options,
    find_plan,
    find_trained,
    find_workload,
    seconds,
    typed,
)
from speedkit.plan import Plan, resolve
from speedkit.train import distributed
from speedkit.workloads.workload import hold_out


def main() -> NoReturn:
    """Run the command line; every failure is one sentence and an exit code, a traceback only with --debug."""
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))  # kept: compiled once
    try:
        if sys.platform == "win32":
            raise UsageError("speedkit needs Linux or macOS: on Windows start it under WSL2 (the README says why)")
        code = commands.main(prog_name="speedkit", standalone_mode=False) or 0
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        code, sentence = _explained(error)
        click.echo(f"speedkit: {' '.join(sentence.split())}", err=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python would print what is raised on its way out
    distributed.leave(code)


def _terminate(number: int, _frame: Any) -> NoReturn:
    # As an exception, so that loader processes are ended and half-written files removed on the way out.
    raise Interrupted("stopped by SIGTERM; what was complete is kept", number)


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the one sentence of a failure."""
    if isinstance(error, SpeedkitError):
        return error.exit_code, str(error)
    if isinstance(error, click.Abort):
        return 130, "stopped by SIGINT; what was complete is kept"
    if isinstance(error, click.NoSuchOption) and (hint := spelling_of_today(error.option_name, typed=True)):
        return error.exit_code, f"No such option {error.option_name!r}{hint}"
    if isinstance(error, click.ClickException):
        return error.exit_code, error.format_message()
    if sentence := missing_extra(error):
        return UsageError.exit_code, sentence
    return 1, f"{type(error).__name__}: {error} (--debug shows where)"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
@click.version_option(__version__)
def commands() -> None:
    """Make PyTorch training as fast as this machine allows, with proof."""


@commands.command(params=[JSON, DEVICE])
def hardware(as_json: bool, device: str) -> None:
    """Show what this machine is, what it can do, and its measured ceilings."""
    from speedkit.ceilings import ceilings

    machine = this_machine(device)
    show = dataclasses.asdict if as_json else str
    rates = {name: show(ceiling) for name, ceiling in ceilings(machine).items()}
    facts = machine.as_dict() | {"advice": machine.advice, "ceilings": rates}
    click.echo(json.dumps(facts, indent=1) if as_json else yaml.safe_dump(facts, sort_keys=False, width=1000))


@commands.command(params=[WORKLOAD, PLAN, *RUN, *field_options(Plan)])
@click.option("--strict", is_flag=True, help="a plan field that cannot be honoured here is an error")
@click.option("--validation", type=SHARE, help="share of the training set to hold out as a validation set")
@click.option("--until", type=float, help="value of the metric at which training ends")
@click.option("--verbose", is_flag=True, help="say why of each field that falls back, however many they are")
@click.option("--deterministic", is_flag=True, help="reproducible kernels on CUDA too")
def train(workload: str, plan: str, **values: Any) -> int:
    """Train WORKLOAD (audio, speech, image, text, or package.module:function) by a recipe, as fast as a plan says."""
    from speedkit.measure.quality import choose_batch_size
    from speedkit.train.fit import fit

    asked = find_plan(plan, values)
    resolve(asked, this_machine(values["device"]), values["strict"])  # before data is touched
    work, recipe = find_workload(workload, values)
    work = hold_out(work, values["validation"]) if values["validation"] else work
    if asked.ranks > 1 and recipe.batch_size == "auto":
        raise PlanError("batch_size=auto trains on one rank: find the number with --ranks 1, and give it here")
    if asked.ranks > 1 and "WORLD_SIZE" not in os.environ:
        return distributed.launch(["speedkit", *sys.argv[1:], "--out", str(values["out"])], asked.ranks)
    if recipe.batch_size == "auto":
        recipe, _ = choose_batch_size(work, recipe, asked, say=click.echo, **typed(values, "device", "cache_dir"))
    options = typed(values, "device", "cache_dir", "out", "resume", "deterministic", "strict", "until", "verbose")
    history = fit(work, recipe, asked, **options)
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"{history.steps} steps in {history.seconds:.1f} s; all else in {values['out']}")
    return 0


@commands.command(params=[WORKLOAD, *RUN])
@click.option("--budget", "budget_s", type=seconds, default="8m", metavar="TIME", help="time for all of it")
@click.option("--rungs", type=lambda names: names.split(","), metavar="NAME,NAME", help="only these rungs")
@click.option("--seeds", type=click.IntRange(2), help="trainings of each plan, to test quality (3, more if in doubt)")
@click.option("--horizon", type=click.IntRange(1), help="steps by which compiling has to pay (the recipe's)")
@click.option("--notebook/--no-notebook", default=True, help="also write climb.ipynb")
def climb(workload: str, notebook: bool, **values: Any) -> None:
    """Climb the whole ladder on WORKLOAD; leave the winning plan, the record and a report."""
    from speedkit.climb import climb as climb_ladder
    from speedkit.notebooks import find_notebooks, run_notebook
    from speedkit.show.frameworks import read_table
    from speedkit.show.report import in_short, write_report

    [source], _ = find_notebooks(["90"]), read_table()  # what the report needs is there before the time is spent
    work, recipe = find_workload(workload, values)
    folder = values["out"]
    options = typed(values, "device", "cache_dir", "out", "resume", "budget_s", "rungs", "seeds", "horizon")
    record = climb_ladder(work, recipe=recipe, **options)
    write_report(record, folder / "report.html")
    if notebook:
        out = str(folder.resolve())
        parameters = {"workload": workload, "out": out, **typed(values, *DATA_FIELDS)}
        options = {"environment": {"SPEEDKIT_RUN_DIR": out}, "folder": Path.cwd(), "progress": False}
        run_notebook(source, folder / "climb.ipynb", parameters, **options)
    if work.quarantined:
        write_quarantine(folder / "quarantine.csv", work.quarantined)
        click.echo(f"files left out: {len(work.quarantined)} (quarantine.csv says why)")
    click.echo(f"report.html, plan.yaml and record.json are in {folder}{' with climb.ipynb' if notebook else ''}")
    click.echo("\n".join(in_short(record)))
    if record["quality"]["decision"] == "worse" and not record["quality"].get("replaced"):
        raise SpeedkitError("the final plan learns worse than plain PyTorch, and nothing can be taken out of it")


@commands.command(params=[WORKLOAD, PLAN, *RUN, *field_options(Plan)])
@click.option("--trace", metavar="FILE", help="keep the profiler's trace, for ui.perfetto.dev")
def doctor(workload: str, plan: str, **values: Any) -> None:
    """Say why training WORKLOAD, or the (model, batch) of a function, is slow, what to change, and what that gives."""
    from speedkit.measure import diagnose
    from speedkit.script import next_levers

    asked = find_plan(plan, values)
    work, recipe = find_workload(workload, values)
    folder = claim_folder(values["out"], "doctor", values["resume"])
    ledger = diagnose.diagnose(work, recipe, asked, **typed(values, "device", "cache_dir", "trace"))
    write_json(folder / "ledger.json", ledger)
    click.echo(diagnose.as_text(ledger))
    if not ledger["diagnosis"]:
        click.echo(next_levers(asked, ledger["rows"], values["device"]))
    click.echo(f"ledger.json in {folder}")


@commands.command(params=[OUT], context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def watch(script: Path, arguments: tuple[str, ...], out: Path) -> None:
    """Run a training SCRIPT with its own ARGUMENTS, nothing in it edited, and say why it is slow.

    PyTorch, Lightning, Accelerate and the Hugging Face Trainer; options of this command stand before SCRIPT.
    """
    from speedkit.script import watch_script

    watch_script(script, arguments, out)


@commands.command(params=[click.Argument(["plan_a"]), click.Argument(["plan_b"]), WORKLOAD, JSON, *RUN])
@click.option("--pairs", default=80, type=click.IntRange(4), help="turns of each plan, at most")
def compare(plan_a: str, plan_b: str, workload: str, **values: Any) -> int:
    """Train WORKLOAD under two plans in turns. Exit code 1 when PLAN_B is shown to be faster: a gate for CI."""
    from speedkit.measure.compare import compare as compare_plans

    a, b = find_plan(plan_a, values), find_plan(plan_b, values)
    work, recipe = find_workload(workload, values)
    options = typed(values, "device", "cache_dir", "pairs")
    comparison = compare_plans(work, a, b, recipe=recipe, names=(plan_a, plan_b), **options)
    click.echo(json.dumps(comparison.as_measurement()) if values["as_json"] else str(comparison))
    for name, effective in ((plan_a, comparison.effective_a), (plan_b, comparison.effective_b)):
        for fallback in effective.fallbacks:
            click.echo(f"  {name}: {fallback}", err=True)
    return 1 if comparison.faster else 0


@commands.command(params=[PLAN, DEVICE, *DATA])
@click.argument("action", type=click.Choice(["build", "info", "verify", "repair"]))
@click.argument("folder", metavar="DIR")
@click.option("--workload", default="audio", help="to build for: audio, or package.module:function")
def cache(action: str, folder: str, workload: str, **values: Any) -> int:
    """Build cached features for --plan in DIR, the folder that --cache-dir names; describe, verify or repair them."""
    from speedkit.data.cache import open_cache
    from speedkit.data.cache_files import caches_in, damaged_rows, describe

    if action == "build":
        work, _ = find_workload(workload, values)
        plan = find_plan(values["plan"], values | {"cache": "disk"})
        built = open_cache(work, [*work.train, *work.validation, *work.test], plan, cache_dir=folder, progress=True)
        lines = [f"{built.folder}: {built.why}", *(f"left out: {path}: {why}" for path, why in built.bad.items())]
    elif action == "info":
        lines = [describe(path) for path in caches_in(folder)]
    else:
        repair = action == "repair"
        damaged = [f"{path}: entry {row}" for path in caches_in(folder) for row in damaged_rows(path, repair=repair)]
        lines = [f"{len(damaged)} entries are not as they were written", *damaged]
    click.echo("\n".join(lines))
    return 1 if action == "verify" and damaged else 0


@commands.command(params=[*DATA, OUT, DEVICE])
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("workload", required=False)
@click.option("--method", default="int8-dynamic", help="how weights are made small")
@click.option("--max-drop", default=0.01, help="what the metric may lose on the test set")
@click.option("--batch-size", default=64, type=click.IntRange(2), help="beside a single sample")
@click.option("--pairs", default=10, type=click.IntRange(4), help="windows of each model")
@click.option("--compile/--no-compile", "compiled", default=True, help="measure compiled models too")
def deploy(checkpoint: Path, workload: str | None, out: Path, **values: Any) -> None:
    """Make the trained model in CHECKPOINT small and fast: quantize, test and export it. WORKLOAD is found in it."""
    from speedkit.deploy import export

    work, model = find_trained(checkpoint, workload, typed(values, *DATA_FIELDS))
    options = typed(values, "device", "method", "max_drop", "batch_size", "pairs", "compiled")
    with warnings.catch_warnings(action="ignore"):  # export's and torchao's, of what they do themselves
        facts = export.deploy(work, model, out, **options)
    measurements = facts.pop("measurements")
    click.echo(yaml.safe_dump(facts, sort_keys=False).rstrip())
    for row in measurements:
        click.echo("{name}: {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as {a}".format(**row))
    click.echo(f"{export.MODEL} and {export.FACTS} in {out}")


@commands.command()
@click.argument("names", nargs=-1, required=True, metavar="NOTEBOOK...")
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter of the notebooks")
@click.option("--sweep", "grid", multiple=True, metavar="NAME=A,B,C", help="run every combination of these")
@click.option("--out", default="runs/notebooks", help="folder for what was run")
@click.option("--timeout", "timeout_s", type=seconds, default="1h", metavar="TIME", help="for each cell")
@click.option("--cluster", metavar="TCP://HOST:PORT", help="sweep on the Dask cluster of this scheduler")
def run(names: tuple[str, ...], out: str, cluster: str | None, **values: Any) -> None:
    """Run notebooks by number or name with parameters; a parameter that one does not declare is an error."""
    from speedkit import notebooks

    grid = {name: words.split(",") for name, _, words in (axis.partition("=") for axis in values["grid"])}
    if (cluster and not grid) or [""] in grid.values():
        raise UsageError("--sweep takes NAME=A,B,C, and --cluster runs its combinations")
    options: Values = {"parameters": dict(values["parameters"]), "timeout_s": values["timeout_s"], "folder": Path.cwd()}
    failures = 0
    with notebooks.cluster_executor(cluster) if cluster else contextlib.nullcontext() as executor:
        for source in notebooks.find_notebooks(names):
            if grid:
                errors = notebooks.sweep(source, grid, out, executor=executor, **options)
                failures += sum(map(bool, errors.values()))
            else:
                click.echo(notebooks.run_notebook(source, Path(out) / source.name, **options))
    if failures:
        raise SpeedkitError(f"{failures} combinations failed; the others are in {out}")


@commands.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def publish(words: tuple[str, ...]) -> int:
    """Run notebooks here for the repository: executed notebooks and records, and the README's tables."""
    if notebooks_folder().is_relative_to(PACKAGE):
        raise UsageError("publish writes into a checkout of speedkit's repository: clone it, and run make setup there")
    sys.path.insert(0, str(notebooks_folder()))  # publish.py is a script of the repository, not of the package
    script, parent = importlib.import_module("publish").command, click.get_current_context().parent
    return script.main(words, "publish", standalone_mode=False, parent=parent)


# Known before and after every command; `main` looks for it where a run fails.
for command in (commands, *commands.commands.values()):
    command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="show tracebacks"))
