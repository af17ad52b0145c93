"""The commands that measure: `hardware | profile | compare | dry-run`."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import click
import yaml

from speedkit.busy import advice
from speedkit.cli.ending import say
from speedkit.cli.options import (
    DEVICE,
    JSON,
    PLAN,
    RUN,
    SCRIPT_ARGUMENTS,
    WORKLOAD,
    WORKLOAD_OR_SCRIPT,
    RunCommand,
    Values,
    WorkloadOrScript,
    field_options,
    find_plan,
    find_workload,
    names_in,
    refuse_options_of_workloads,
    refuse_words_of_scripts,
    seconds,
    typed,
)
from speedkit.errors import UsageError
from speedkit.files import claim_folder, write_json, write_text
from speedkit.machine import this_machine
from speedkit.plan import Plan, as_plan

WORKLOAD_IF_ANY = click.Argument(["workload"], metavar="WORKLOAD | SCRIPT", default="")
OWN_GPU = {
    "sm": "10 times its compute capability",
    "memory": "GB",
    "bandwidth": "GB/s of its memory",
    "tflops": "of its products in 16 bits",
}
OWN_GPU_OPTIONS = [
    click.Option([f"--{name}"], type=float, help=f"of a GPU of your own: {what}") for name, what in OWN_GPU.items()
]


@click.command(params=[JSON, DEVICE])
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


@click.command(cls=WorkloadOrScript, params=[WORKLOAD_IF_ANY, SCRIPT_ARGUMENTS, PLAN, *RUN, *field_options(Plan)])
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
    refuse_words_of_scripts(arguments, "stop", "hang")
    if read_trace is not None:
        breakdown = profile_trace(Path(read_trace))
        folder = claim_folder(values["out"], "profile")
    else:
        asked = find_plan(plan, values)
        work, recipe = find_workload(workload, values)
        folder = claim_folder(values["out"], "profile", values["resume"])
        if hint := advice(this_machine(values["device"])):
            click.echo(hint, err=True)
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


@click.command(cls=RunCommand, params=[click.Argument(["plan_a"]), click.Argument(["plan_b"]), WORKLOAD, JSON, *RUN])
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


@click.command("dry-run", cls=WorkloadOrScript, params=[*WORKLOAD_OR_SCRIPT, JSON, *RUN, *OWN_GPU_OPTIONS])
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

    chosen = chosen_gpus(gpus, typed(values, *OWN_GPU))
    if workload.endswith(".py"):
        refuse_options_of_workloads(workload, "gpus", "as_json", *OWN_GPU)
        check_script(Path(workload))
        find = functools.partial(dry_run_script, Path(workload), arguments)
        rows = dry.dry_runs(workload, find, ["of the script"], gpus=chosen, tell=say)
    else:
        refuse_words_of_scripts(arguments)
        plan = values["plan"]
        as_plan(plan)  # a word that names no plan is refused before anything is counted
        work, recipe = find_workload(workload, values)
        find = functools.partial(dry.dry_run, work, recipe=recipe)
        rows = dry.dry_runs(work.name, find, ["baseline", plan], gpus=chosen, tell=say)
    folder = claim_folder(values["out"], "dry-run")
    write_json(folder / "dry-run.json", rows)
    write_text(folder / "dry-run.html", dry.as_page(rows))
    click.echo(json.dumps(rows) if values["as_json"] else dry.as_page(rows, "text.j2"))
