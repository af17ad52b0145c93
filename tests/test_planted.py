"""The planted causes: each is there in the amount that it says, changes nothing that is learned, and is found."""

import itertools

import pytest
import torch

from speedkit.errors import UsageError
from speedkit.hardware import this_machine
from speedkit.measure.turns import in_turns
from speedkit.measure.watch import watch
from speedkit.workloads.planted import CAUSES, NOT_ON_CPU, planted, why_not

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HERE = [
    (cause, device) for device, cause in itertools.product(DEVICES, CAUSES) if not why_not(cause, this_machine(device))
]


def longer_by(cause, device):
    """Return by how many seconds a step is longer where `cause` is planted, and the loop that has it."""
    healthy, loop = planted("healthy", 0, device), planted(cause, 0.05, device)
    row = in_turns(cause, {"with it": lambda: loop.train(2), "without": lambda: healthy.train(2)}, 6, device)
    return (min(row["seconds_a"]) - min(row["seconds_b"])) / 2, loop


@pytest.mark.parametrize(("cause", "device"), HERE)
def test_a_step_is_longer_by_what_was_injected(cause, device):
    for attempt in range(3):  # what else the machine does may fall on the planting, or on a turn
        longer_s, loop = longer_by(cause, device)
        if attempt == 2 or longer_s == pytest.approx(loop.injected_s_per_step, rel=0.5):
            break
    assert longer_s == pytest.approx(loop.injected_s_per_step, rel=0.5)
    assert 0.02 < loop.injected_s_per_step < 0.2
    assert loop.expected == (cause, CAUSES[cause])


@pytest.mark.parametrize(
    ("cause", "device", "amount"),
    [
        (*here, amount)
        for here in HERE
        for amount in (0.0, 1e-3)
        if here[0] != "new shapes" or not amount  # their batches are other ones
    ],
)
def test_planting_changes_nothing_that_is_learned(cause, device, amount):
    weights = []
    for loop in (planted("healthy", 0, device), planted(cause, amount, device)):
        loop.train(2)
        weights.append(torch.cat([weight.flatten() for weight in loop.model.parameters()]))
    assert torch.equal(*weights)


def test_no_two_batches_of_new_shapes_have_one_length():
    loop = planted("new shapes", 1e-3, "cpu")
    assert len({batch[0].shape for batch in itertools.islice(loop.loader, 20)}) == 20


def test_what_a_cpu_cannot_have_is_refused_with_the_reason():
    for cause, why in NOT_ON_CPU.items():
        with pytest.raises(UsageError, match=f"'{cause}' cannot be planted on .*: {why[:20]}"):
            planted(cause, 0.01, "cpu")
    with pytest.raises(UsageError, match="'slow coffee' cannot be planted: take healthy, slow decode"):
        planted("slow coffee", 0.01, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "device"), HERE)
def test_the_diagnosis_names_what_was_planted_first_with_its_seconds(cause, device):
    for attempt in range(3):  # what else the machine does may fall on the planting, or on the watched steps
        loop = planted(cause, 3 * planted("healthy", 0, device).step_s(), device)
        with watch(loop.model, loop.optimizer, loop.loader, show=False) as seen:
            loop.train(40)
        first = seen.diagnosis[0]
        assert (first["cause"], first["field"]) == loop.expected
        if attempt == 2 or first["seconds"] == pytest.approx(loop.injected_s_per_step, rel=0.5):
            break
    assert first["seconds"] == pytest.approx(loop.injected_s_per_step, rel=0.5)  # 20 % where nothing else runs


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_diagnosis_finds_nothing_in_a_healthy_loop(device):
    loop = planted("healthy", 0, device)
    with watch(loop.model, loop.optimizer, loop.loader, show=False) as seen:
        loop.train(40)
    assert seen.diagnosis == []
