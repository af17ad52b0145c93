"""What lessons 10 and 11 load: the parts of a batch, epochs of several loaders in turns, and files to decode."""

import functools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from speedkit.clock import timed
from speedkit.data.batch import map_batch
from speedkit.data.loader import collate
from speedkit.machine import this_machine
from speedkit.measure.stats import paired_interval
from speedkit.recipe import Recipe
from speedkit.workload import Workload

REPEATS = 7  # rounds over one batch of items; the median counts


def examine(workload: Workload, recipe: Recipe) -> list[dict[str, Any]]:
    """Return rows `{part, sample_ms, share}`, one for each part of a batch of files made in the training process.

    Files are read from the page cache, where they are after the first round.
    """
    device, items = this_machine().device, workload.train[: recipe.batch_size]
    waveforms = [workload.load(item) for item in items]
    features = [workload.features(waveform) for waveform in waveforms]
    samples = list(zip(features, map(workload.target, items), strict=True))
    varies = workload.length is not None
    batch = collate(samples, varies)
    parts: dict[str, Callable[[], Any]] = {
        "read": lambda: [Path(item.path).read_bytes() for item in items],
        "decode": lambda: [workload.load(item) for item in items],
        "features": lambda: [workload.features(waveform) for waveform in waveforms],
        "collate": lambda: collate(samples, varies),
        "copy": lambda: map_batch(batch, functools.partial(Tensor.to, device=device)),
    }
    batch_s = {part: statistics.median(timed(call, device, REPEATS)) for part, call in parts.items()}
    batch_s["decode"] = max(0.0, batch_s["decode"] - batch_s["read"])  # it reads the files too
    whole_s = sum(batch_s.values())
    return [
        {"part": part, "sample_ms": 1e3 * part_s / len(items), "share": part_s / whole_s}
        for part, part_s in batch_s.items()
    ]


def epochs_in_turns(
    step: Callable[[Any], Any], sides: Mapping[str, tuple[DataLoader, int]], rounds: int, *, kind: str = ""
) -> list[dict[str, Any]]:
    """Return a row of `measurements` for each loader by its label, against the first: `step(batch)` over its epochs.

    `sides` has each loader with the threads of this process. All take turns in random order, whole epochs each: no
    batch is made ahead in the turn of another. The first epoch starts the workers, and does not count.
    """
    device, before = this_machine().device, torch.get_num_threads()
    took: dict[str, list[float]] = {label: [] for label in sides}
    for _ in range(rounds + 1):
        for label in random.sample([*sides], len(sides)):
            loader, threads = sides[label]
            torch.set_num_threads(threads)
            [epoch_s] = timed(functools.partial(_epoch, step, loader), device, 1, warmup=0)
            took[label].append(epoch_s / len(loader))
    torch.set_num_threads(before)
    rows: list[dict[str, Any]] = []
    for label, (loader, threads) in sides.items():
        a_s, b_s = next(iter(took.values()))[1:], took[label][1:]
        found = vars(paired_interval(a_s, b_s))
        decision = "faster" if found["low"] > 1 else "slower" if found["high"] < 1 else "undecided"
        row: dict[str, Any] = {
            "name": f"{kind}workers={label}",
            "a": f"{kind}no workers",
            "b": f"{kind}workers={label}",
        }
        row |= {"label": label, "workers": loader.num_workers, "threads": threads}
        row |= {"seconds_a": a_s, "seconds_b": b_s, "step_s": statistics.median(a_s) / found["ratio"]}
        rows.append({**row, **found, "decision": decision})
    return rows


def _epoch(step: Callable[[Any], Any], loader: DataLoader) -> None:
    for batch in loader:
        step(batch)


def in_formats(items: Sequence[Any], folder: Path, *, seconds: int = 3) -> dict[str, list[Path]]:
    """Write the begin of each sound as WAV, FLAC, OGG and MP3, and a picture of enlarged noise; return their paths."""
    import soundfile  # an extra

    paths: dict[str, list[Path]] = {name: [] for name in ("WAV", "FLAC", "OGG", "MP3", "JPEG")}
    noise = torch.randint(256, (96, 128, 3), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).resize((1024, 768)).save(folder / "picture.jpg", quality=90)
    for index, item in enumerate(items):
        sound, rate_hz = soundfile.read(item.path, dtype="int16")
        for name, written in paths.items():
            if name == "JPEG":
                written.append(folder / "picture.jpg")
                continue
            written.append(folder / f"{index}.{name.lower()}")
            soundfile.write(written[-1], sound[: seconds * rate_hz], rate_hz)
    return paths


def short_clips(items: Sequence[Any], folder: Path, count: int) -> list[Path]:
    """Write so many sounds of 4,000 samples, in a folder for each class; return their paths in order."""
    import soundfile  # an extra

    for number in range(count):
        item = items[number % len(items)]
        sound, rate_hz = soundfile.read(item.path, start=number, frames=4000, dtype="int16")
        place = folder / Path(item.path).parent.name
        place.mkdir(parents=True, exist_ok=True)
        soundfile.write(place / f"{number:05d}.wav", sound, rate_hz)
    return sorted(folder.rglob("*.wav"))
