"""`speedkit cache build | info | verify | repair DIR`, where DIR is the folder that --cache-dir names."""

from typing import Any

import click

from speedkit.data.cache import describe_caches, open_cache, repair_cache, verify_cache
from speedkit.options import DATA, data_options, the_workload
from speedkit.plan import Plan

directory = click.argument("folder", metavar="DIR")


@click.group()
def cache() -> None:
    """Build, describe, verify or repair cached features. DIR is the folder that --cache-dir names."""


@cache.command()
@directory
@click.option("--workload", default="audio", show_default=True, help="audio, or package.module:function")
@data_options
@click.option("--of", "cache_of", default="features", show_default=True, metavar="FEATURES | WAVEFORM")
@click.option("--dtype", "cache_dtype", default="float32", show_default=True, metavar="FLOAT32 | FLOAT16")
@click.option("--decoder", default="soundfile", show_default=True, help="what reads audio files")
def build(folder: str, workload: str, **values: Any) -> None:
    """Compute and keep the features of all items, so that training starts with them."""
    work, _ = the_workload(workload, values)
    plan = Plan(cache="disk", **{key: values[key] for key in ("cache_of", "cache_dtype", "decoder")})
    items = [*work.train, *work.test]
    found = open_cache(work, items, plan, cache_dir=folder, progress=True)
    click.echo(f"{found.folder}\n{found.why}")
    for path, why in found.bad.items():
        click.echo(f"  left out: {path}: {why}")


@cache.command()
@directory
def info(folder: str) -> None:
    """Show what is cached, how much of it is there, and how large it is."""
    click.echo("\n".join(describe_caches(folder)))


@cache.command()
@directory
def verify(folder: str) -> int:
    """Read every entry and compare it with its checksum; exit code 1 when one is not as it was written."""
    problems = verify_cache(folder)
    click.echo("".join(f"{name}: {why}\n" for name, why in problems) + f"{len(problems) or 'nothing'} is damaged")
    return 1 if problems else 0


@cache.command()
@directory
@click.option("--workload", help="audio, or package.module:function; what the cache itself says without")
@data_options
def repair(folder: str, workload: str | None, **values: Any) -> None:
    """Compute the entries again that are not as they were written."""
    options = {name: values[name] for name in DATA if values[name] is not None}
    click.echo(f"{repair_cache(folder, workload, **options)} entries computed again")
