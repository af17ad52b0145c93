"""Runs on a GPU that is not there, and what they asked of it: each function is called in a process that has one."""

import contextlib
import dataclasses
import tempfile
import traceback
from pathlib import Path

import torch

from speedkit.dry.counts import counted
from speedkit.lab.workloads import load_workload
from speedkit.plan import Plan
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

torch.backends.cuda.enable_cudnn_sdp(False)  # its graphs ask more of an engine than the stand-in offers

FEW = {"text": {}, "image": {"clips": 200}, "audio": {"clips": 200}, "speech": {"clips": 100}}  # what data to make
WARM_UP, COUNTED = 5, 4  # steps, between two log points


def small(name):
    workload = load_workload(name, size="tiny", **FEW[name])
    return dataclasses.replace(workload, train=workload.train[:400], test=workload.test[:40])


def course(workload, fields, cache_dir):
    """What COUNTED steps of a plan asked of the GPU, per step, and what became of the plan."""
    plan = Plan(**fields, log_every=1000)
    with contextlib.closing(
        setup_run(workload, plan=plan, device="cuda", endless=True, progress=False, cache_dir=cache_dir)
    ) as run:
        training = steps(run)
        for _ in range(WARM_UP):
            next(training)
        torch.cuda.reset_peak_memory_stats()
        with counted() as counts:
            for _ in range(COUNTED):
                next(training)
        return {
            "devices": sorted({weight.device.type for weight in run.learner.model.parameters()}),
            "effective": {field: getattr(run.plan, field) for field in fields},
            "fallbacks": [str(fallback) for fallback in run.effective.fallbacks],
            "launches": counts.launches / COUNTED,
            "by kind": {kind: counts[kind] / COUNTED for kind in counts.names},
            "waits": counts.waits / COUNTED,
            "waited in": dict(counts.names["sync"]),
            "copies": dict(counts.names["memcpy"]),
            "stubs": sorted(counts.names["stub"]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }


def courses(name, plans):
    """The course of each plan of a workload, or how it failed."""
    workload = small(name)
    rows = []
    with tempfile.TemporaryDirectory() as cache_dir:
        for fields in plans:
            try:
                rows.append(course(workload, fields, cache_dir))
            except Exception:
                rows.append({"error": traceback.format_exc()})
    return rows


def whole(name, fields):
    """A training to its end, with evaluations, checkpoints and a resume."""
    workload = small(name)
    workload = dataclasses.replace(workload, recipe=dataclasses.replace(workload.recipe, epochs=None, steps=8))
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(**fields, validate_every=3)
        history = fit(workload, plan=plan, device="cuda", progress=False, out=Path(folder, "out"), cache_dir=folder)
        again = fit(
            workload, plan=plan, device="cuda", progress=False, out=Path(folder, "out"), cache_dir=folder, resume=True
        )
    return len(history.loss), len(history.evaluations), history.device, again.resumed_from
