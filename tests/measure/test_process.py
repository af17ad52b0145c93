"""Measuring leaves the process as it was, also where it fails: random states, switches, signals, warnings' filters."""

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader

from speedkit.machine import this_machine
from speedkit.measure import peaks
from speedkit.measure.bottlenecks import profile_workload
from speedkit.measure.breakdown import breakdown_of
from speedkit.measure.compare import compare
from speedkit.measure.profile import profile
from speedkit.plan import Plan

MKLDNN, CUDNN = torch.backends.mkldnn, torch.backends.cudnn
SWITCHES = (torch.backends.cuda.matmul, CUDNN, CUDNN.conv, CUDNN.rnn, MKLDNN, MKLDNN.matmul, MKLDNN.conv, MKLDNN.rnn)
# What PyTorch itself leaves: that of Kineto, and Inductor's.
PYTORCHS_OWN = {"KINETO_LOG_LEVEL", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}


def older(switch):
    """What a switch says, or why it says nothing beside the newer ones."""
    try:
        return switch()
    except RuntimeError as error:
        return str(error)


def picture():
    """All of the process that measuring could change."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    loggers = logging.root.manager.loggerDict.items()
    return {
        "random": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],  # noqa: NPY002
        "torch": [torch.get_rng_state().tolist(), *map(torch.Tensor.tolist, torch.cuda.get_rng_state_all())],
        "newer switches": [switch.fp32_precision for switch in (torch.backends, *SWITCHES)],
        "products": older(torch.get_float32_matmul_precision),
        "tf32": (older(lambda: cudnn.allow_tf32), older(lambda: matmul.allow_tf32)),
        "cudnn": (cudnn.benchmark, cudnn.deterministic, cudnn.enabled),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autograd": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu")),
        "threads": torch.get_num_threads(),
        "stance": dataclasses.asdict(torch._dynamo.eval_frame._stance),
        "profilers": (torch.autograd._profiler_enabled(), sys.getprofile()),
        "patched": (torch.autograd.backward, torch.save, torch.Tensor.cpu, DataLoader.__iter__, nn.Module.__init__),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGCHLD}},
        "start method": multiprocessing.get_start_method(),
        "filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "environment": {key: value for key, value in os.environ.items() if key not in PYTORCHS_OWN},
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "log levels": {name: logger.level for name, logger in loggers if getattr(logger, "level", 0)},
    }


class Items:
    """A data set that draws from every random state there is, and fails where it is told to."""

    def __init__(self, fails):
        self.fails = fails

    def __len__(self):
        return 40 * 4

    def __getitem__(self, index):
        if self.fails and index == 90:
            raise ZeroDivisionError("planted")
        return torch.rand(8) + random.random() + np.random.rand(), index % 2  # noqa: NPY002


def failing_loss(model, batch, recipe):
    raise ZeroDivisionError("planted")


def workload(fails):
    if fails:
        return dataclasses.replace(tiny.points(), loss=failing_loss)
    return tiny.points(dropout=0.2)


def compared(fails):
    fast = Plan(precision="tf32", cudnn_benchmark=True, workers=1)
    compare(workload(fails), Plan(), fast, device="cpu", pairs=10)


def broken_down(fails):
    breakdown_of(workload(fails), device="cpu", window_s=0.1)


def workload_profiled(fails):
    profile_workload(workload(fails), device="cpu")


def peaks_measured(fails):
    """It calls nothing of somebody's that could fail."""
    peaks.measure(this_machine("cpu"))


@pytest.fixture(params=["fresh", "older switches", "newer switches"])
def somebodys_switches(request):
    """What somebody may have set before."""
    if request.param == "older switches":
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = False
    elif request.param == "newer switches":
        torch.backends.fp32_precision = "tf32"
    yield
    tiny.reset_switches()


MEASURED = [(measure, fails) for measure in (compared, broken_down, workload_profiled) for fails in (False, True)]


@pytest.mark.parametrize(("measure", "fails"), [*MEASURED, (peaks_measured, False)])
def test_measuring_leaves_the_process_as_it_was(measure, fails, somebodys_switches):
    before = picture()
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        measure(fails)
    after = picture()
    assert {key for key in before if before[key] != after[key]} == set()


def seed():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


def train(model, optimizer, loader):
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs.float()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fails", [False, True])
def test_profiling_a_loop_moves_nothing_but_what_the_loop_does(fails):
    """Two loops, one of them profiled, from the same random states on."""
    pictures = []
    for profiled in (False, True):
        seed()
        model, loader = nn.Linear(8, 2), DataLoader(Items(fails), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        block = profile(model, optimizer, loader, show=False) if profiled else contextlib.nullcontext()
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(), block as seen:
            train(model, optimizer, loader)
        pictures.append(picture())
    assert seen.breakdown.steps == (19 if fails else 20)
    assert {key for key in pictures[0] if pictures[0][key] != pictures[1][key]} == set()
