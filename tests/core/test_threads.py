"""Threads within one operation: those of the plan whose turn it is, and afterwards the process's own."""

import contextlib
import dataclasses

import pytest
import torch
from tiny import points

from speedkit.plan import Plan
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def noting(workload, seen):
    """The workload, whose loss adds to `seen` how many threads there are."""

    def loss(model, batch, recipe):
        seen.append(torch.get_num_threads())
        return workload.loss(model, batch, recipe)

    return dataclasses.replace(workload, loss=loss)


def test_each_plan_has_its_own_number_in_its_turn():
    seen = []
    options = {"device": "cpu", "progress": False, "endless": True}
    with contextlib.ExitStack() as stack:
        turns = []
        for plan in (Plan(threads=1), Plan(), Plan(threads=2)):
            run = stack.enter_context(contextlib.closing(setup_run(noting(points(), seen), plan=plan, **options)))
            turns.append((run, steps(run)))
        for run, training in (*turns, *reversed(turns)):
            run.learner.precision.set_switches()
            next(training)
    assert seen == [1, 3, 2, 2, 3, 1]
    assert torch.get_num_threads() == 3
