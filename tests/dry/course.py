"""Runs on a GPU that is not there, and what they asked of it: each function is called in a process that has one."""

import collections
import contextlib
import dataclasses
import functools
import tempfile
import traceback
from pathlib import Path
from unittest.mock import patch

import torch

from speedkit.dry.counts import counted, launches_so_far
from speedkit.lab.workloads import load_workload
from speedkit.machine import this_machine
from speedkit.plan import PRESETS
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

torch.backends.cuda.enable_cudnn_sdp(False)  # its graphs ask more of an engine than the stand-in offers

FEW = {"text": {}, "image": {"clips": 200}, "audio": {"clips": 200}, "speech": {"clips": 100}}  # what data to make
WARM_UP, COUNTED = 5, 4  # steps, between two log points


def small(name):
    workload = load_workload(name, size="tiny", **FEW[name])
    return dataclasses.replace(workload, train=workload.train[:400], test=workload.test[:40])


def plan_of(fields):
    fields = dict(fields)
    preset = PRESETS[fields.pop("preset", "baseline")](this_machine("cuda"))
    return dataclasses.replace(preset, **fields, log_every=1000)


def adding(launches, part, function):
    """`function`, whose launches are added to those of its part of a step."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        before = launches_so_far()
        returned = function(*args, **kwargs)
        launches[part] += launches_so_far() - before
        return returned

    return call


def course(workload, fields, cache_dir, read_back=False):
    """What COUNTED steps of a plan asked of the GPU, per step, and what became of the plan."""
    launches = collections.Counter()
    loss = adding(launches, "forward", workload.loss)

    def reading(*args):
        value, outputs = loss(*args)
        value.item()
        return value, outputs

    workload = dataclasses.replace(workload, loss=reading if read_back else loss)
    plan = plan_of(fields)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            contextlib.closing(
                setup_run(workload, plan=plan, device="cuda", endless=True, progress=False, cache_dir=cache_dir)
            )
        )
        optimizer = run.learner.optimizer
        stack.enter_context(
            patch.object(torch.autograd, "backward", adding(launches, "backward", torch.autograd.backward))
        )
        stack.enter_context(patch.object(optimizer, "step", adding(launches, "update", optimizer.step)))
        training = steps(run)
        for _ in range(WARM_UP):
            next(training)
        torch.cuda.reset_peak_memory_stats()
        launches.clear()
        with counted() as counts:
            for _ in range(COUNTED):
                next(training)
        return {
            "devices": sorted({weight.device.type for weight in run.learner.model.parameters()}),
            "parts": {part: number / COUNTED for part, number in launches.items()},
            "effective": {field: getattr(run.plan, field) for field in fields if field != "preset"},
            "fallbacks": [str(fallback) for fallback in run.effective.fallbacks],
            "launches": counts.launches / COUNTED,
            "waits": counts.waits / COUNTED,
            "copies": {name: number / COUNTED for name, number in counts.names["memcpy"].items()},
            "stubs": sorted(counts.names["stub"]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "micro_batch": run.learner.micro_batch,
        }


def courses(name, plans, read_back=False):
    """The course of each plan of a workload by name, or how it failed."""
    workload = small(name)
    rows = {}
    with tempfile.TemporaryDirectory() as cache_dir:
        for plan, fields in plans.items():
            try:
                rows[plan] = course(workload, fields, cache_dir, read_back)
            except Exception:
                rows[plan] = {"error": traceback.format_exc()}
    return rows


def whole(name, fields):
    """A training to its end with evaluations and checkpoints, and another that goes on from there."""
    workload = small(name)
    workload = dataclasses.replace(workload, recipe=dataclasses.replace(workload.recipe, epochs=None, steps=8))
    with tempfile.TemporaryDirectory() as folder:
        train = functools.partial(
            fit,
            workload,
            plan=dataclasses.replace(plan_of(fields), log_every=2, validate_every=3),
            device="cuda",
            progress=False,
            out=Path(folder, "out"),
            cache_dir=folder,
        )
        first = train()
        again = train(resume=True)
    return len(first.loss), len(first.evaluations), first.device, again.resumed_from


def attention_of_cudnn():
    """How many kernels attention by cuDNN takes, forward and backward."""
    query = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    with counted() as counts, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    return counts.launches
