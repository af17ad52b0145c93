"""Measuring leaves the process as it was, also where it fails: random states, switches, signals, warnings' filters."""

import contextlib
import multiprocessing
import os

import pytest
import tiny
import torch
from faults import limited
from picture import LEFT_BY_MEASURING, differences, picture

from speedkit.errors import SpeedkitError
from speedkit.machine import this_machine
from speedkit.measure import peaks
from speedkit.measure.compare import compare
from speedkit.measure.process import new_process
from speedkit.measure.profile_report import profile_workload
from speedkit.plan import Plan


def workload(fails):
    if fails:
        return limited(tiny.points(), 0, raises=ZeroDivisionError("planted"))
    return tiny.points(dropout=0.2)


def compared(fails):
    fast = Plan(precision="tf32", cudnn_benchmark=True, workers=1)
    compare(workload(fails), Plan(), fast, device="cpu", pairs=10)


def broken_down(fails):
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


MEASURED = [(measure, fails) for measure in (compared, broken_down) for fails in (False, True)]


@pytest.mark.parametrize(("measure", "fails"), [*MEASURED, (peaks_measured, False)])
def test_measuring_leaves_the_process_as_it_was(measure, fails, somebodys_switches):
    multiprocessing.get_start_method()  # which is chosen when it is first asked for
    before = picture(LEFT_BY_MEASURING)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        measure(fails)
    assert differences(before, picture(LEFT_BY_MEASURING)) == {}


def test_functions_are_called_in_a_new_process():
    with new_process(contextlib.nullcontext, os.getpid) as call:
        assert call() == call() != os.getpid()
    with new_process(contextlib.nullcontext, print) as call:  # what is printed there is no answer
        assert call("words") is None


@pytest.mark.parametrize(
    ("function", "argument", "why"),
    [
        (lambda argument: argument, 1, "cannot be sent to a new process: .*lambda"),
        (int, "no number", "failed in a new process: ValueError: invalid literal .* 'no number'"),
        (os._exit, 7, "ended with exit code 7"),
    ],
    ids=["of no module", "fails", "ends"],
)
def test_what_a_new_process_cannot_do_is_one_sentence(function, argument, why):
    with pytest.raises(SpeedkitError, match=why), new_process(contextlib.nullcontext, function) as call:
        call(argument)
