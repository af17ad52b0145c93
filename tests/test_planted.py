"""The diagnosis names each injected slowdown first, with the field that cures it; nothing in a healthy loop."""

import itertools
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


def healthy_step_s(device):
    loop = Loop(device)
    return statistics.median(timed(lambda: loop.train(10), device, 9, warmup=2)) / 10


@pytest.mark.parametrize(("cause", "device"), [here for here in HERE if here[0] != "new shapes"])
def test_an_injected_slowdown_changes_nothing_that_is_learned(cause, device):
    weights = []
    for injected in (False, True):
        loop = Loop(device)
        if injected:
            inject_slowdown(loop, cause, 1e-3)
        loop.train(2)
        weights.append(torch.cat([weight.flatten() for weight in loop.model.parameters()]))
    assert torch.equal(*weights)


def test_no_two_batches_of_new_shapes_have_one_length():
    loop = Loop("cpu")
    inject_slowdown(loop, "new shapes", 1e-3)
    assert len({batch[0].shape for batch in itertools.islice(loop.loader, 20)}) == 20


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "device"), HERE)
def test_the_diagnosis_names_what_was_injected_first_with_its_seconds(cause, device):
    for attempt in range(3):  # what else the machine does may fall on the watched steps
        loop = Loop(device)
        inject_slowdown(loop, cause, 3 * healthy_step_s(device))
        first = watched(loop).diagnosis[0]
        assert (first["cause"], first["field"]) == (cause, CAUSES[cause])
        if device == "cuda":  # which hides part of what its host does: no clock of the host's knows the seconds
            return
        if attempt == 2 or first["seconds"] == pytest.approx(loop.injected_s, rel=0.5):
            break
    assert first["seconds"] == pytest.approx(loop.injected_s, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_diagnosis_finds_nothing_in_a_healthy_loop(device):
    assert watched(Loop(device)).diagnosis == []
