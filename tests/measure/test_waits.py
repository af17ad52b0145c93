"""What makes the host wait is found, at its line and with its count, and nothing of the project's own loop is."""

import contextlib
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from tiny import DEVICES, jitter, loss, points

from speedkit.measure.waits import audit
from speedkit.plan import Plan
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

PLANTED = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wait_is_found_at_its_line_with_its_count(name, device):
    planted, inputs = PLANTED[name], torch.randn(6, 6, device=device)
    planted(inputs)

    def work():
        for _ in range(3):
            planted(inputs * 2 + 1)

    [sync, *others] = [sync for sync in audit(work, device) if sync.file == __file__]
    assert (sync.line, others) == (inspect.getsourcelines(planted)[1], [])
    assert sync.count >= 3 and sync.count % 3 == 0 and sync.seconds > 0
    assert sync.code.startswith(f'"{name}"')


def waits(workload, device):
    """The waits of five steps of the project's loop, all within an epoch and between log points.

    Without those of the loader: its indices lie in the host's memory beside any GPU, which a CPU cannot tell.
    """
    plan = Plan(log_every=1000, validate_every=0, fused_optimizer=True, workers=1, micro_batch=5)
    if device == "cuda":  # a pageable copy is a wait
        plan = dataclasses.replace(plan, pin_memory=True, prefetch=True)
    with contextlib.closing(setup_run(workload, plan=plan, device=device, progress=False)) as run:
        training = steps(run)
        next(training)
        syncs = audit(lambda: [next(training) for _ in range(5)], device)
    return [sync for sync in syncs if device == "cuda" or Path(sync.file).parent.name != "data"]


def reading_loss(model, batch, recipe):
    value, outputs = loss(model, batch, recipe)
    value.detach().item()
    return value, outputs


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_waits_between_log_points_but_a_read_in_the_loss_which_is_blamed_on_it(device):
    workload = points(train=100, augment=jitter, dropout=0.2, clip_norm=1.0)
    [sync] = waits(dataclasses.replace(workload, loss=reading_loss), device)
    assert (sync.file, sync.code, sync.count) == (__file__, "value.detach().item()", 5 * 4)  # micro-batches
