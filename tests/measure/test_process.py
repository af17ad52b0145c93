"""Measuring leaves the process as it was, also where it fails: random states, switches, signals, warnings' filters."""

import contextlib
import dataclasses
import multiprocessing
import random

import numpy as np
import pytest
import tiny
import torch
from picture import differences, picture
from torch import nn
from torch.utils.data import DataLoader

from speedkit.machine import this_machine
from speedkit.measure import peaks
from speedkit.measure.bottlenecks import profile_workload
from speedkit.measure.breakdown import breakdown_of
from speedkit.measure.compare import compare
from speedkit.measure.profile import profile
from speedkit.plan import Plan

# What PyTorch itself leaves: that of Kineto, and Inductor's.
PYTORCHS_OWN = ("KINETO_LOG_LEVEL", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")


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
    multiprocessing.get_start_method()  # which is chosen when it is first asked for
    before = picture(PYTORCHS_OWN)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        measure(fails)
    assert differences(before, picture(PYTORCHS_OWN)) == {}


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
        pictures.append(picture(PYTORCHS_OWN))
    assert seen.breakdown.steps == (19 if fails else 20)
    assert differences(*pictures) == {}
