"""A workload of small files for the tests of the cache: twenty of them with 8 numbers each, or of different lengths."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
from tiny import Point, points, target

from speedkit.data.cache import open_cache
from speedkit.data.decode import BadItem
from speedkit.plan import Plan

CPU = torch.device("cpu")


def load_file(item):
    if not Path(item.path).exists():
        raise BadItem(item.path, "it is missing")
    return torch.from_numpy(np.fromfile(item.path, dtype=np.float32))


def features(waveform, gain):
    return waveform * gain


def bands(waveform, gain):
    """[T] -> [2, T]"""
    return torch.stack((waveform, gain * waveform))


def length(item):
    return Path(item.path).stat().st_size // 4


def write(path, count=8):
    torch.randn(count).mul_(0.1).numpy().tofile(path)


def files_workload(folder, count=20, varies=False):
    folder.mkdir(exist_ok=True)
    items = [Point(str(folder / f"{number:03d}.raw"), number % 2) for number in range(count)]
    for number, item in enumerate(items):
        if not Path(item.path).exists():
            write(item.path, 8 + number % 5 if varies else 8)
    return dataclasses.replace(
        points(),
        train=items,
        test=items[:2],
        load=load_file,
        target=target,
        parameters={"gain": 2.0},
        features=functools.partial(bands if varies else features, gain=2.0),
        sources=(),
        length=length if varies else None,
    )


def opened(workload, folder, items=None, **plan):
    items = workload.train if items is None else items
    return open_cache(workload, items, Plan(**({"cache": "disk"} | plan)), cache_dir=folder)


def live(workload, items=None):
    return torch.stack([workload.features(workload.load(item)) for item in (items or workload.train)])


def served(cache):
    return cache.gather(torch.arange(len(cache)), CPU)[0]


def content(folder):
    """Name -> bytes of every file in a cache's folder."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
