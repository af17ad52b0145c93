"""Features or waveforms computed once and kept, found again by all that they depend on."""

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedkit.data import store
from speedkit.data.build import Builder, build
from speedkit.data.entries import FeatureCache
from speedkit.data.fingerprint import base_folder, content, difference, fingerprint, sources_of
from speedkit.data.samples import loading
from speedkit.errors import SpeedkitError
from speedkit.hardware import cache_root
from speedkit.plan import Plan


def open_cache(
    workload: Any,
    items: Sequence[Any],
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    cache_dir: str | Path | None = None,
    progress: bool = False,
    hash_content: bool = False,
) -> FeatureCache:
    """Return the cache of `items` that `plan` asks for; entries that are missing or stale are computed first.

    An entry is stale when its file's size or time of change is another; where a cache was built with `hash_content`,
    only when the content is. All are when what `fingerprint` tells has changed. `progress` shows how building goes.
    Raises SpeedkitError when the folder cannot be written, the disk is too small, or no item can be read.
    """
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
    say = functools.partial(print, flush=True) if progress else lambda text: None
    builder = builder_of(workload, items, plan, cache_dir, hash_content)
    changed = ""
    for _ in range(3):  # settling a folder whose files are damaged can bring more that is missing to light
        state, rows, missing, why = _compare(builder)
        changed = changed or why
        if state is not None and not len(missing) and not state.problems:
            break
        try:
            with store.locked(builder.folder, say):
                state, rows, missing, why = _compare(builder)  # what another has built meanwhile is not built again
                if len(missing):
                    say(f"{builder.folder.name}: {why}")
                    manifest = state.manifest if state is not None else None
                    build(builder, missing, workload.length is not None, manifest, say, progress)
                elif state is not None and state.problems:
                    store.settle(builder.folder, state.manifest)
        except SpeedkitError:
            if state is None or len(missing):
                raise
            break  # all entries are there, and the folder cannot be written: what is wrong in it stays
    assert state is not None
    cache = FeatureCache(builder, state, rows, changed)
    if not cache.usable.any():
        (path, why), *_ = cache.bad.items()
        raise SpeedkitError(f"none of the {len(items)} files of {workload.name} can be read; {path}: {why}")
    cache.place(plan.cache, torch.device(device), state.manifest["item_s"])
    return cache


def builder_of(workload: Any, items: Sequence[Any], plan: Plan, cache_dir: Any, hashed: bool = False) -> Builder:
    """Return what computes the entries of `items`, and knows their folder: one for all items of a data set."""
    base = base_folder([*workload.train, *workload.test] or items)
    dtype = "int16" if plan.cache_of == "waveform" else plan.cache_dtype
    load = loading(workload, plan)
    identity = repr((workload.name, os.path.abspath(base), plan.cache_of, dtype))
    root = Path(cache_dir) if cache_dir else cache_root() / "features"
    name = re.sub(r"[^\w.-]", "_", workload.name)
    about = {
        "workload": workload.name, "made_by": json.loads(json.dumps(dict(workload.made_by), default=str)), "base": base,
        "cache_of": plan.cache_of, "decoder": plan.decoder, "dtype": dtype, "shape": None, "hashed": hashed,
        "fingerprint": fingerprint(workload, load, plan.cache_of),
    }  # fmt: skip
    features = workload.features if plan.cache_of == "features" else None
    folder = root / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return Builder(folder, about, load, features, workload.target, items, sources_of(items, base))


def _compare(builder: Builder) -> tuple[store.State | None, np.ndarray, np.ndarray, str]:
    """Return (what the folder holds of this fingerprint, where each item is in it, the items it lacks, why these)."""
    sources, now = builder.sources, builder.about["fingerprint"]
    state = store.read(builder.folder, now)
    if state is None:
        missing = np.unique(sources.keys, return_index=True)[1]
        old = store.read_manifest(builder.folder)
        why = difference(old["about"]["fingerprint"], now) if old else ""
        return None, missing, np.sort(missing), f"{why}{': ' if why else ''}building all {len(missing)} entries"
    builder.about = state.about
    rows = store.latest(state.column("keys"), sources.keys)
    same = rows >= 0
    for column, mine in (("sizes", sources.sizes), ("modified_ns", sources.modified_ns)):
        if len(known := state.column(column)):
            same &= known[rows] == mine
    if state.about["hashed"]:
        kept = state.column("contents")
        for index in np.flatnonzero(~same & (rows >= 0)).tolist():
            same[index] = kept[rows[index]] == content(getattr(builder.items[index], "path", None)) != 0
    missing = np.flatnonzero(~same)
    missing = missing[np.sort(np.unique(sources.keys[missing], return_index=True)[1])]
    added = int((rows[missing] < 0).sum())
    parts = [f"{count} {what}" for count, what in ((len(missing) - added, "changed"), (added, "added")) if count]
    building = f": building {len(missing)} of {len(sources.keys)} entries" if parts else ""
    return state, rows, missing, ", ".join(parts) + building
