"""Two plans that take turns, each in a process of its own."""

import dataclasses
import os
from pathlib import Path

import psutil
import pytest
import tiny

from speedkit.errors import SpeedkitError
from speedkit.measure.apart import compare_apart
from speedkit.plan import Plan


def noting(model, batch, recipe):
    with Path(os.environ["PROCESSES"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return tiny.loss(model, batch, recipe)


def failing(model, batch, recipe):
    raise ZeroDivisionError("planted")


def compared(loss, *, workers=0):
    work = dataclasses.replace(tiny.points(train=64), loss=loss)
    plans = {"baseline": Plan(), "final": Plan(workers=workers, prefetch_factor=2)}
    return compare_apart(work, plans, recipe=work.recipe, name="both", device="cpu", pairs=4, looks=())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_each_plan_trains_in_a_process_of_its_own_that_ends(workers, tmp_path, monkeypatch):
    processes = tmp_path / "processes"
    monkeypatch.setenv("PROCESSES", str(processes))
    row = compared(noting, workers=workers)
    assert len(row["seconds_a"]) == len(row["seconds_b"]) == 4 and row["low"] < row["ratio"] < row["high"]
    assert (row["a"], row["b"], row["steps_per_turn"]) == ("baseline", "final", max(1, 2 * workers))
    seen = set(processes.read_text().split())
    assert len(seen) == 2 and str(os.getpid()) not in seen
    assert not [pid for pid in seen if psutil.pid_exists(int(pid))]


@pytest.mark.slow
def test_a_plan_that_fails_in_its_process_is_one_sentence():
    with pytest.raises(SpeedkitError, match="failed in a new process: ZeroDivisionError: planted"):
        compared(failing)


@pytest.mark.slow
def test_a_plan_that_cannot_begin_in_its_process_is_one_sentence():
    work = dataclasses.replace(tiny.points(train=64), model=failing)  # which takes arguments
    plans = {"baseline": Plan(), "final": Plan(log_every=5)}
    with pytest.raises(SpeedkitError, match="failed in a new process: TypeError: failing"):
        compare_apart(work, plans, recipe=work.recipe, name="both", device="cpu", pairs=4, looks=())
