"""Features or waveforms computed once and kept, found again by all that they depend on."""

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
from speedkit.data.decode import with_decoder
from speedkit.data.entries import FeatureCache
from speedkit.data.fingerprint import base_folder, content, difference, fingerprint, sources_of
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
    builder = builder_of(workload, items, plan, cache_dir, hash_content)
    builder.progress = progress
    state, rows, missing, why = _compare(builder)
    if state is None or len(missing) or state.problems:
        try:
            with store.locked(builder.folder, builder.say):
                state, rows, missing, why = _compare(builder)  # what another has built meanwhile is not built again
                if state is None or len(missing):
                    builder.say(f"{builder.folder.name}: {why}")
                    build(builder, missing, state)
                    state, rows, *_ = _compare(builder)
                elif state.problems:
                    store.settle(builder.folder, state.manifest)
        except SpeedkitError:
            if state is None or len(missing):
                raise  # else all entries are there, and what is wrong stays in a folder that cannot be written
    assert state is not None
    cache = FeatureCache(builder, state, rows, why)
    if not cache.usable.any():
        (path, why), *_ = cache.bad.items()
        raise SpeedkitError(f"none of the {len(items)} files of {workload.name} can be read; {path}: {why}")
    cache.place(plan.cache, torch.device(device), state.manifest["item_s"])
    return cache


def builder_of(workload: Any, items: Sequence[Any], plan: Plan, cache_dir: Any, hashed: bool = False) -> Builder:
    """Return what computes the entries of `items`, and knows their folder: one for all items of a data set."""
    base = base_folder([*workload.train, *workload.test] or items)
    dtype = workload.kept_as if plan.cache_of == "waveform" else plan.cache_dtype
    load = with_decoder(workload, plan.decoder)
    identity = repr((workload.name, os.path.abspath(base), plan.cache_of, dtype))
    root = Path(cache_dir) if cache_dir else cache_root() / "features"
    name = re.sub(r"[^\w.-]", "_", workload.name)
    about = {
        "workload": workload.name,
        "made_by": json.loads(json.dumps(dict(workload.made_by), default=str)),
        "base": base,
        "cache_of": plan.cache_of,
        "decoder": plan.decoder,
        "dtype": dtype,
        "hashed": hashed,
        "shape": None,
        "varies": workload.length is not None,
        "fingerprint": fingerprint(workload, load, plan.cache_of),
    }
    features = workload.features if plan.cache_of == "features" else None
    folder = root / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return Builder(folder, about, load, features, workload.target, items, sources_of(items, base))


def _compare(builder: Builder) -> tuple[store.State | None, np.ndarray, np.ndarray, str]:
    """Return (what the folder holds of this fingerprint, where each item is in it, the items it lacks, why these)."""
    sources, state = builder.sources, store.read(builder.folder)
    changed = difference(state.about["fingerprint"], builder.about["fingerprint"]) if state else ""
    if state is None or changed:
        missing = np.sort(np.unique(sources["keys"], return_index=True)[1])
        return None, missing, missing, f"{changed}{': ' if changed else ''}building all {len(missing)} entries"
    builder.about = state.about
    rows, same = store.current(state, sources)
    if state.about["hashed"]:
        for index in np.flatnonzero(~same & (rows >= 0)).tolist():
            now = content(getattr(builder.items[index], "path", None))
            same[index] = state.column("contents")[rows[index]] == now != 0
    missing = np.flatnonzero(~same)
    missing = missing[np.sort(np.unique(sources["keys"][missing], return_index=True)[1])]
    added = int((rows[missing] < 0).sum())
    parts = [f"{count} {what}" for count, what in ((len(missing) - added, "changed"), (added, "added")) if count]
    building = f": building {len(missing)} of {len(sources['keys'])} entries" if parts else ""
    return state, rows, missing, ", ".join(parts) + building
