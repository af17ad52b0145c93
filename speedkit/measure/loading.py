"""The loader's doctor: where the time of a batch goes, part by part, and what each lever would make of a step."""

import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from speedkit.clock import timed
from speedkit.data.decode import BadItem
from speedkit.data.samples import collate, loading
from speedkit.errors import PlanError, SpeedkitError
from speedkit.hardware import Hardware, this_machine
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.run import begin, close

REPEATS = 7  # rounds over one batch of items; the median counts
SHORT = 0.7  # a lever brings between this share of what it could bring and all of it


def examine(workload: Any, recipe: Recipe | None = None, device: str = "auto") -> dict[str, Any]:
    """Return `parts` and `levers` of a plain training step, its data loaded in the training process.

    `parts` are rows `{part, sample_s, share}`: read, decode, resample, features, collate, copy, compute, as far as the
    workload has them, measured on one batch of its items (read from the page cache: that files are there is certain,
    having just been read). `levers` are rows `{field, change, predicted_speedup_low, predicted_speedup_high, why}`,
    the best first, as far as this machine and the data can use them.
    """
    recipe, hardware = recipe or workload.recipe, this_machine(device)
    ways = _ways(workload, recipe.batch_size, hardware)
    took_s = {name: statistics.median(timed(way, hardware.device, REPEATS)) for name, way in ways.items()}
    took_s["compute"] = _compute_s(workload, recipe, hardware.device)
    read_s, load_s = took_s.get("read", 0.0), took_s["load"]
    own_rate_s = took_s.get("own rate", load_s)
    parts_s = {"read": read_s, "decode": own_rate_s - read_s, "resample": load_s - own_rate_s}
    parts_s = {part: max(0.0, seconds) for part, seconds in parts_s.items() if part == "decode" or seconds}
    parts_s |= {part: took_s[part] for part in ("features", "collate", "copy", "compute") if part in took_s}
    step_s = sum(parts_s.values())
    rows = [
        {"part": part, "sample_s": seconds / recipe.batch_size, "share": seconds / step_s}
        for part, seconds in parts_s.items()
    ]
    return {"workload": workload.name, "step_s": step_s, "parts": rows,
            "levers": _levers(parts_s, took_s, workload, hardware)}  # fmt: skip


def as_text(found: dict[str, Any]) -> str:
    """Return what `examine` found as two tables."""
    lines = [f"a plain step of {found['workload']} takes {1e3 * found['step_s']:.3g} ms; per sample:"]
    lines += ["  {part:<10}{0:>10.4g} ms {share:>7.1%}".format(1e3 * row["sample_s"], **row) for row in found["parts"]]
    lines += ["what would change (time before / time after, predicted):"]
    for row in found["levers"]:
        change = ", ".join(f"{field}={value}" for field, value in row["change"].items())
        lines += ["  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {0}: {why}".format(change, **row)]
    return "\n".join(lines)


def _ways(workload: Any, batch_size: int, hardware: Hardware) -> dict[str, Callable[[], Any]]:
    """Return, by name, what is timed: each does one thing to the same batch of items."""
    items, waveforms, device = list[Any](), list[torch.Tensor](), hardware.device
    for item in workload.train:
        with contextlib.suppress(BadItem):
            waveforms.append(workload.load(item))
            items.append(item)
        if len(items) == batch_size:
            break
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to examine")
    targets = map(workload.target, items)
    samples = [(workload.features(waveform), target, 0) for waveform, target in zip(waveforms, targets, strict=True)]
    batch, *_ = collate(samples, workload.length is not None)
    ways = {
        "load": lambda: [workload.load(item) for item in items],
        "features": lambda: [workload.features(waveform) for waveform in waveforms],
        "collate": lambda: collate(samples, workload.length is not None),
    }
    files = [path for item in items if (path := Path(getattr(item, "path", ""))).is_file()]
    if len(files) == len(items):
        ways["read"] = lambda: [path.read_bytes() for path in files]
    rate_hz = getattr(workload.load, "keywords", {}).get("sample_rate_hz")
    if rate_hz and any(item.sample_rate_hz != rate_hz for item in items):
        ways["own rate"] = lambda: [_at_own_rate(workload.load, item) for item in items]
    if device.type != "cpu":
        ways["copy"] = lambda: [tensor.to(device) for tensor in batch]
    if workload.length is None:
        stacked = torch.stack(waveforms).to(device)
        ways["features on the device"] = lambda: workload.features(stacked)
    for decoder in workload.decoders:
        if _possible({"decoder": decoder}, workload, hardware):
            load = loading(workload, Plan(decoder=decoder))
            ways[decoder] = lambda load=load: [load(item) for item in items]
    return ways


def _at_own_rate(load: Any, item: Any) -> torch.Tensor:
    """Load as much of an item as `load` does, without resampling."""
    longer = item.sample_rate_hz / load.keywords["sample_rate_hz"]
    return load(item, sample_rate_hz=item.sample_rate_hz, num_samples=round(load.keywords["num_samples"] * longer))


def _compute_s(workload: Any, recipe: Recipe, device: torch.device) -> float:
    """Return the seconds of a training step whose batch is there already."""
    run = begin(workload, recipe, device=device, endless=True)
    batch = run.batches.next()
    run.batches.next = lambda: batch  # type: ignore[method-assign]
    course = steps(run)
    seconds = timed(lambda: next(course), device, REPEATS, warmup=2)
    close(run)
    return statistics.median(seconds)


def _possible(change: dict[str, Any], workload: Any, hardware: Hardware) -> bool:
    """Whether this machine and the workload can use a change of the plan as it is."""
    try:
        loading(workload, Plan(**change))
        return not resolve(Plan(**change), hardware, workload=workload).fallbacks
    except PlanError:
        return False


def _levers(
    parts_s: dict[str, float], took_s: dict[str, float], workload: Any, hardware: Hardware
) -> list[dict[str, Any]]:
    """Return the rows of `levers`: each is the plain step with some of its parts taken out, hidden or replaced."""
    step_s, compute_s, cores = sum(parts_s.values()), parts_s["compute"], hardware.cores
    data_s, copy_s = step_s - compute_s, parts_s.get("copy", 0.0)
    gathered_s, on_device_s = compute_s + parts_s["collate"] + copy_s, took_s.get("features on the device", 0.0)
    busy = hardware.threads if hardware.device.type == "cpu" else 0  # cores that the model keeps from the workers
    hidden_s = max(compute_s, data_s / cores, (data_s + busy * compute_s) / cores)
    levers: list[tuple[dict[str, Any], float, str]] = [
        ({"workers": cores}, hidden_s, "data is made while the model computes, on cores that have nothing else to do"),
        ({"cache": "ram"}, gathered_s, "features are computed once"),
        ({"cache": "ram", "cache_of": "waveform"}, gathered_s + on_device_s, "files are decoded once"),
        ({"features_on": "device"}, step_s - parts_s["features"] + on_device_s, "computed for a batch at once"),
        ({"shards": True}, step_s - parts_s.get("read", 0.0), "one file instead of many; more from a slow disk"),
        ({"prefetch": True, "pin_memory": True}, step_s - copy_s, "the copy runs beside the computation"),
    ]
    levers += [({"decoder": name}, step_s - took_s["load"] + took_s[name], "measured on these files")
               for name in workload.decoders if name in took_s]  # fmt: skip
    rows = []
    for change, best_s, why in levers:
        if _possible(change, workload, hardware):
            # Workers may gain nothing at all: they compete with the model where there is no core to spare.
            least = 0.0 if "workers" in change else SHORT
            low, high = sorted((step_s / (step_s + least * (best_s - step_s)), step_s / best_s))
            rows.append({"field": next(iter(change)), "change": change, "predicted_speedup_low": low,
                         "predicted_speedup_high": high, "why": why})  # fmt: skip
    return sorted(rows, key=lambda row: -row["predicted_speedup_high"])
