"""The loader's doctor: where the time of a batch goes, part by part, and what each lever would make of a step."""

import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedkit.clock import timed
from speedkit.data.decode import BadItem, with_decoder
from speedkit.data.loader import collate
from speedkit.errors import PlanError, SpeedkitError
from speedkit.hardware import Hardware, this_machine
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train.checkpoint import get_random_state, set_random_state
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

REPEATS = 7  # rounds over one batch of items; the median counts
SHORT = 0.7  # a lever brings between this share of what it could bring and all of it


def examine(
    workload: Any, recipe: Recipe | None = None, device: str = "auto", compute_s: float | None = None
) -> dict[str, Any]:
    """Return `workload`, `step_s`, `parts` and `levers` of a plain training step, loaded in the training process.

    `parts` are rows `{part, sample_s, share}`, measured on one batch of items; reading is from the page cache, where
    the files are after the first round. `levers` are rows `{field, change, predicted_speedup_low,
    predicted_speedup_high}`, the best first, of what this machine and the data can use. `compute_s`, the seconds of a
    step whose batch is there already, are measured where they are not given.
    """
    recipe, hardware = recipe or workload.recipe, this_machine(device)
    ways = _ways(workload, recipe.batch_size, hardware)
    took_s = {name: statistics.median(timed(way, hardware.device, REPEATS)) for name, way in ways.items()}
    own_rate_s = min(took_s["load"], took_s.get("own rate", took_s["load"]))
    parts_s = {"read": took_s["read"], "decode": own_rate_s - took_s["read"], "resample": took_s["load"] - own_rate_s}
    parts_s |= {part: took_s[part] for part in ("features", "collate", "copy")}
    parts_s["compute"] = compute_s or _compute_s(workload, recipe, hardware.device)
    parts_s = {part: max(0.0, seconds) for part, seconds in parts_s.items()}
    step_s = sum(parts_s.values())
    rows = [
        {"part": part, "sample_s": seconds / recipe.batch_size, "share": seconds / step_s}
        for part, seconds in parts_s.items()
    ]
    levers = [
        _lever(change, step_s, seconds)
        for change, seconds in _changed_s(parts_s, took_s, hardware)
        if _possible(change, workload, hardware)
    ]
    levers.sort(key=lambda row: -row["predicted_speedup_high"])
    return {"workload": workload.name, "step_s": step_s, "parts": rows, "levers": levers}


def as_text(found: dict[str, Any]) -> str:
    """Return what `examine` found as two tables."""
    lines = [f"a plain step of {found['workload']} takes {1e3 * found['step_s']:.3g} ms; per sample:"]
    lines += ["  {part:<10}{0:>10.4g} ms {share:>7.1%}".format(1e3 * row["sample_s"], **row) for row in found["parts"]]
    lines += ["what would change (time before / time after, predicted):"]
    row_of = "  {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}  {change}".format_map
    return "\n".join([*lines, *map(row_of, found["levers"])])


def facts(found: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return what the diagnosis reads of what `examine` found: what a batch costs, and for a plain plan the levers."""
    took_s = {row["part"]: row["share"] * found["step_s"] for row in found["parts"]}
    items_s = sum(took_s[part] for part in ("read", "decode", "resample", "features"))
    levers = found["levers"] if plan.cache == "off" and plan.workers == 0 else []
    return {"items_s": items_s, "collate_s": took_s["collate"], "levers": levers}


def facts_of_loader(loader: Any) -> dict[str, Any]:
    """Return the same of anybody's DataLoader, by a batch of its first items; nothing where these have no numbers.

    The global random state is afterwards what it was before.
    """
    data: Any = getattr(loader, "dataset", None)
    collate, size = getattr(loader, "collate_fn", None), getattr(loader, "batch_size", None)
    if collate is None or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return {}
    many = getattr(data, "__getitems__", lambda rows: [data[row] for row in rows])
    before, rows = get_random_state(torch.device("cpu")), list(range(min(size or 1, len(data))))
    items_s = statistics.median(timed(lambda: many(rows), "cpu", 3))
    items = many(rows)
    collate_s = statistics.median(timed(lambda: collate(items), "cpu", 3))
    set_random_state(before, torch.device("cpu"))
    return {"items_s": items_s, "collate_s": collate_s, "workers": loader.num_workers}


def _ways(workload: Any, batch_size: int, hardware: Hardware) -> dict[str, Callable[[], Any]]:
    """Return, by name, what is timed: each does one thing to the same batch of items."""
    items, waveforms, varies = [], list[Tensor](), workload.length is not None
    for item in workload.train:
        with contextlib.suppress(BadItem):
            waveforms.append(workload.load(item))
            items.append(item)
        if len(items) == batch_size:
            break
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to examine")
    samples = [(workload.features(row), workload.target(item)) for item, row in zip(items, waveforms, strict=True)]
    batch: Any = collate(samples, varies)[0]
    files = [path for item in items if (path := Path(getattr(item, "path", ""))).is_file()]
    ways: dict[str, Callable[[], Any]] = {
        "read": lambda: [path.read_bytes() for path in files],
        "load": lambda: [workload.load(item) for item in items],
        "features": lambda: [workload.features(waveform) for waveform in waveforms],
        "collate": lambda: collate(samples, varies),
        "copy": lambda: [tensor.to(hardware.device) for tensor in batch],
    }
    if not varies:
        stacked = torch.stack(waveforms).to(hardware.device)
        ways["features on the device"] = lambda: workload.features(stacked)
    settings = getattr(workload.load, "keywords", {})
    rate_hz = settings.get("sample_rate_hz")
    if rate_hz and any(item.sample_rate_hz != rate_hz for item in items):
        seconds = settings.get("num_samples", 0) / rate_hz  # of each item; 0: its own length
        ways["own rate"] = lambda: [
            workload.load(
                item,
                sample_rate_hz=item.sample_rate_hz,
                **({"num_samples": round(seconds * item.sample_rate_hz)} if seconds else {}),
            )
            for item in items
        ]
    if _possible({"decoder": "torchcodec"}, workload, hardware):
        load = with_decoder(workload, "torchcodec")
        ways["torchcodec"] = lambda: [load(item) for item in items]
    return ways


def _compute_s(workload: Any, recipe: Recipe, device: torch.device) -> float:
    """Return the seconds of a training step whose batch is there already."""
    run = setup_run(workload, recipe, device=device, endless=True)
    batch = run.fetch()
    run.fetch = lambda: batch
    course = steps(run)
    seconds = timed(lambda: next(course), device, REPEATS, warmup=2)
    run.close()
    return statistics.median(seconds)


def _possible(change: dict[str, Any], workload: Any, hardware: Hardware) -> bool:
    """Whether this machine and the workload can use a change of the plan as it is."""
    try:
        with_decoder(workload, Plan(**change).decoder)
        return not resolve(Plan(**change), hardware, workload=workload).fallbacks
    except PlanError:
        return False


def _changed_s(parts_s: dict[str, float], took_s: dict[str, float], hardware: Hardware) -> list[tuple[dict, float]]:
    """Return (change of the plan, seconds of a step at best): parts of it are taken out, hidden or replaced."""
    step_s, compute_s, cores = sum(parts_s.values()), parts_s["compute"], hardware.cores
    data_s, gathered_s = step_s - compute_s, compute_s + parts_s["collate"] + parts_s["copy"]
    on_device_s = took_s.get("features on the device", 0.0)
    busy = hardware.threads if hardware.device.type == "cpu" else 0  # cores that the model keeps from the workers
    return [
        ({"workers": cores}, max(compute_s, data_s / cores, (data_s + busy * compute_s) / cores)),
        ({"cache": "ram"}, gathered_s),
        ({"cache": "ram", "cache_of": "waveform"}, gathered_s + on_device_s),
        ({"features_on": "device"}, step_s - parts_s["features"] + on_device_s),
        ({"shards": True}, step_s - parts_s["read"]),
        ({"decoder": "torchcodec"}, step_s - took_s["load"] + took_s.get("torchcodec", 0.0)),
        ({"prefetch": True, "pin_memory": True}, step_s - parts_s["copy"]),
    ]


def _lever(change: dict[str, Any], step_s: float, best_s: float) -> dict[str, Any]:
    # Workers may gain nothing at all: they compete with the model where there is no core to spare.
    least_s = step_s if "workers" in change else step_s + SHORT * (best_s - step_s)
    low, high = sorted((step_s / least_s, step_s / best_s))
    text = ", ".join(f"{field}={value}" for field, value in change.items())
    return {"field": next(iter(change)), "change": text, "predicted_speedup_low": low, "predicted_speedup_high": high}
