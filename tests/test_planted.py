"""The diagnosis names each injected slowdown first, with the field that cures it; nothing in a healthy loop."""

import statistics

import pytest
import torch
from slowdowns import CAUSES, Loop, causes_on, inject_slowdown

from speedkit.clock import timed
from speedkit.measure.watch import watch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HERE = [(cause, device) for device in DEVICES for cause in causes_on(device)]


def watched(loop):
    with watch(loop.model, loop.optimizer, loop.loader, show=False) as seen:
        loop.train(40)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "device"), HERE)
def test_the_diagnosis_names_what_was_injected_first_with_its_seconds(cause, device):
    healthy = Loop(device)
    healthy_s = statistics.median(timed(lambda: healthy.train(10), device, 9, warmup=2)) / 10
    loop = Loop(device)
    inject_slowdown(loop, cause, 3 * healthy_s)
    seen = watched(loop)
    first = seen.diagnosis[0]
    assert (first["cause"], first["field"]) == (cause, CAUSES[cause])
    if device == "cpu":  # a GPU hides part of what its host does
        assert 0.4 < first["seconds"] / seen.ledger.step_s < 0.95  # three quarters of a step were injected


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_diagnosis_finds_nothing_in_a_healthy_loop(device):
    assert watched(Loop(device)).diagnosis == []
