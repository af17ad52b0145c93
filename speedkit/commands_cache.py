"""`speedkit cache build | info | verify | repair DIR`, where DIR is the folder that --cache-dir names."""

import os
from pathlib import Path
from typing import Any

import click

from speedkit.data import build as building
from speedkit.data import store
from speedkit.data.cache import builder_of, open_cache
from speedkit.data.fingerprint import difference
from speedkit.errors import SpeedkitError, UsageError
from speedkit.options import DATA, data_options, the_workload
from speedkit.plan import Plan
from speedkit.workloads import load_workload

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
@click.option("--hash-content", is_flag=True, help="later tell a touched file from a changed one, by its content")
def build(folder: str, workload: str, hash_content: bool, **values: Any) -> None:
    """Compute and keep the features of all items, so that training starts with them."""
    work, _ = the_workload(workload, values)
    plan = Plan(cache="disk", **{key: values[key] for key in ("cache_of", "cache_dtype", "decoder")})
    items = [*work.train, *work.test]
    found = open_cache(work, items, plan, cache_dir=folder, progress=True, hash_content=hash_content)
    click.echo(f"{found.folder}: {found.changed or 'all entries are there'}\n{found.why}")
    for path, why in found.bad.items():
        click.echo(f"  left out: {path}: {why}")


@cache.command()
@directory
def info(folder: str) -> None:
    """Show what is cached, how large and how exact it is, and how much of it nothing uses any more."""
    for path in _caches(folder):
        if (state := store.read(path)) is None:
            click.echo(f"{path}: nothing in it can be read")
            continue
        about, manifest, keys = state.about, state.manifest, state.column("keys")
        shards, _ = store.sealed(path, about["fingerprint"])
        files = [name for shard in shards if about["base"] for name in shard.names]
        stale = len(keys) - len(set(keys.tolist())) + sum(not os.path.exists(about["base"] + name) for name in files)
        click.echo(
            f"{path}: {len(keys)} entries of workload {about['workload']} ({about['base'] or 'no files'}), "
            f"{about['cache_of']} as {about['dtype']}, {state.column('counts').sum()} values in {len(state.shards)} "
            f"shards, largest rounding error {manifest.get('max_error', 0.0):.3g}, {len(state.bad)} unusable, {stale} "
            f"out of use; built in {manifest['build_s']:.3g} s ({len(keys) / max(manifest['build_s'], 1e-9):.3g}/s)"
        )
        for name, why in state.problems:
            click.echo(f"  {name}: {why}")


@cache.command()
@directory
def verify(folder: str) -> int:
    """Read every entry and compare it with its checksum; exit code 1 when one is not as it was written."""
    found = {path: building.verify(path) for path in _caches(folder)}
    for path, problems in found.items():
        click.echo(f"{path}: {len(problems) or 'nothing'} not as it was written")
        for name, why in problems:
            click.echo(f"  {name}: {why}")
    return 1 if any(found.values()) else 0


@cache.command()
@directory
@click.option("--workload", help="audio, or package.module:function; what the cache itself says without")
@data_options
def repair(folder: str, workload: str | None, **values: Any) -> None:
    """Compute the entries again that are not as they were written."""
    for path in _caches(folder):
        if (state := store.read(path)) is None:
            raise SpeedkitError(f"{path} tells nothing of what it held: remove it, it is built again")
        made_by = dict(state.about["made_by"]) | ({"name": workload} if workload else {})
        if "name" not in made_by:
            raise UsageError(f"{path} does not say how its workload is made: name it with --workload")
        work = load_workload(**made_by, **{key: values[key] for key in DATA if values[key] is not None})
        dtype = state.about["dtype"].replace("int16", "float32")  # waveforms have one dtype
        plan = Plan(cache_of=state.about["cache_of"], cache_dtype=dtype, decoder=state.about["decoder"])
        builder = builder_of(work, [*work.train, *work.test], plan, folder)
        if changed := difference(state.about["fingerprint"], builder.about["fingerprint"]):
            raise SpeedkitError(f"{path} is stale, and is built again when it is next used: {changed}")
        builder.folder = path
        with store.locked(path, click.echo):
            click.echo(f"{path}: {building.repair(builder)} entries computed again")


def _caches(folder: str) -> list[Path]:
    inside = sorted(Path(folder).glob("*"))
    found = [path for path in inside if (path / store.MANIFEST).exists() or store.shard_files(path)]
    if not found:
        raise UsageError(f"{folder} holds no feature cache: name the folder that --cache-dir named")
    return found
