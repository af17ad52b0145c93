"""A profile names each slowdown that lesson 02 plants first, with the field that cures it, and nothing else."""

import pytest

from speedkit.lessons.planted import CAUSES, Loop, why_not
from speedkit.machine import this_machine
from speedkit.measure.profile import profile

HERE = this_machine()


def profiled(loop):
    with profile(loop.model, loop.optimizer, loop.loader, show=False) as seen:
        loop.train(40)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("cause", [cause for cause in CAUSES if not why_not(cause, HERE)])
def test_a_profile_names_what_was_planted_first_with_its_seconds(cause):
    loop = Loop(cause, 3 * Loop().step_s())
    seen = profiled(loop)
    assert seen.bottlenecks, f"{seen.notes}\n{seen.breakdown}\n{seen.breakdown.facts.trace}"
    first = seen.bottlenecks[0]
    assert (first["cause"], first["field"]) == (cause, CAUSES[cause])
    if HERE.device.type == "cpu":  # a GPU hides part of what its host does
        assert 0.5 < first["seconds"] / loop.injected_s_per_step < 2  # of both others that are busy take their share


@pytest.mark.slow
def test_a_profile_finds_nothing_in_a_healthy_loop():
    assert profiled(Loop()).bottlenecks == []
