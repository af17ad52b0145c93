"""The commands beside training and measuring: `cache | run | lab | publish`."""

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from speedkit.cli.options import DATA, DEVICE, PLAN, Values, find_plan, find_workload, seconds
from speedkit.errors import SpeedkitError, UsageError
from speedkit.lab.provenance import ROOT


def part_of(word: str) -> tuple[int, int]:
    """Return the numbers in `3/16`."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", word)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise UsageError(f"{word!r} is no part: write 3/16 for the third of sixteen")
    return int(numbers[1]), int(numbers[2])


@click.command(params=[PLAN, DEVICE, *DATA])
@click.argument("action", type=click.Choice(["build", "info", "verify", "repair"]))
@click.argument("folder", metavar="DIR")
@click.option("--workload", default="audio", help="to build for: audio, or package.module:function")
@click.option("--part", type=part_of, metavar="K/N", help="build one part; a build without --part joins them")
@click.option("--cluster", metavar="TCP://HOST:PORT", help="build on the Dask cluster of this scheduler, and join")
def cache(action: str, folder: str, workload: str, **values: Any) -> int:
    """Build cached features for --plan in DIR, the folder that --cache-dir names; describe, verify or repair them."""
    from speedkit.lab.caches import build_joined, build_on_cluster, build_part, caches_in, damage, describe

    if action == "build":
        work, _ = find_workload(workload, values)
        items = [*work.train, *work.validation, *work.test]
        plan = find_plan(values["plan"], values | {"cache": "disk"})
        if values["part"]:
            built = build_part(work, items, plan, folder=folder, part=values["part"], progress=True)
        elif values["cluster"]:
            built = build_on_cluster(work, items, plan, folder=folder, address=values["cluster"])
        else:
            built = build_joined(work, items, plan, folder=folder)
        lines = [f"{built.folder}: {built.why}"]
        lines += [f"left out: {path}: {why}" for path, why in built.bad.items()]
    elif action == "info":
        lines = [describe(path) for path in caches_in(folder)]
    else:
        damaged = []
        for path in caches_in(folder):
            damaged += [f"{path}: {what}" for what in damage(path, repair=action == "repair")]
        lines = [f"{len(damaged)} parts are not as they were written", *damaged]
    click.echo("\n".join(lines))
    return 1 if action == "verify" and damaged else 0


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NOTEBOOK...")
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter of the notebooks")
@click.option("--sweep", "grid", multiple=True, metavar="NAME=A,B,C", help="run every combination of these")
@click.option("--out", default="runs/notebooks", help="folder for what was run")
@click.option("--timeout", "timeout_s", type=seconds, default="1h", metavar="TIME", help="for each cell")
@click.option("--cluster", metavar="TCP://HOST:PORT", help="sweep on the Dask cluster of this scheduler")
def run(names: tuple[str, ...], out: str, cluster: str | None, **values: Any) -> None:
    """Run notebooks by number or name with parameters; a parameter that one does not declare is an error."""
    from speedkit.lab import notebooks
    from speedkit.lab.cluster import cluster_executor

    grid = {}
    for axis in values["grid"]:
        name, _, words = axis.partition("=")
        grid[name] = words.split(",")
    if (cluster and not grid) or [""] in grid.values():
        raise UsageError("--sweep takes NAME=A,B,C, and --cluster runs its combinations")
    options: Values = {"parameters": dict(values["parameters"]), "timeout_s": values["timeout_s"], "folder": Path.cwd()}
    failures = 0
    with contextlib.ExitStack() as stack:
        executor = None
        if cluster:
            executor = stack.enter_context(cluster_executor(cluster))
        for source in notebooks.find_notebooks(names):
            if grid:
                errors = notebooks.sweep(source, grid, out, executor=executor, **options)
                failures += sum(map(bool, errors.values()))
            else:
                click.echo(notebooks.run_notebook(source, Path(out) / source.name, **options))
    if failures:
        raise SpeedkitError(f"{failures} combinations failed; the others are in {out}")


@click.command()
@click.argument("folder", default="lessons", metavar="[DIR]")
@click.argument("arguments", nargs=-1, metavar="[-- JUPYTER'S ARGUMENTS]")
def lab(folder: str, arguments: tuple[str, ...]) -> int:
    """Open a working copy of the lessons in JupyterLab; a lesson that DIR has already stays as it is."""
    from speedkit.lab.notebooks import find_notebooks

    Path(folder).mkdir(parents=True, exist_ok=True)
    for source in find_notebooks():
        if not Path(folder, source.name).exists():
            shutil.copy(source, folder)
    command = [sys.executable, "-m", "jupyter", "lab", f"--notebook-dir={folder}", *arguments]
    return subprocess.run(command, check=False).returncode


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def publish(words: tuple[str, ...]) -> int:
    """Run notebooks here for the repository: executed notebooks and records, and the README's tables."""
    script = ROOT / "tools" / "publish.py"  # of the repository, not of the package
    if not script.exists():
        raise UsageError("publish writes into a checkout of speedkit's repository: clone it, and run make setup there")
    return subprocess.run([sys.executable, script, *words], check=False).returncode
