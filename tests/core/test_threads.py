"""Threads within one operation: those of the plan whose turn it is, and afterwards the process's own."""

import contextlib

import pytest
import torch
from tiny import calling, opened, points

from speedkit.plan import Plan
from speedkit.train.loop import steps


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_plan_has_its_own_number_in_its_turn():
    seen = []
    noting = calling(points(), lambda *_: seen.append(torch.get_num_threads()))
    with contextlib.ExitStack() as stack:
        turns = []
        for plan in (Plan(threads=1), Plan(), Plan(threads=2)):
            run = stack.enter_context(opened(noting, plan=plan, endless=True))
            turns.append((run, steps(run)))
        for run, training in (*turns, *reversed(turns)):
            run.learner.precision.set_switches()
            next(training)
    assert seen == [1, 3, 2, 2, 3, 1]
    assert torch.get_num_threads() == 3
