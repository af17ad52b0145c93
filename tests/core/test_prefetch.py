"""Copying the next batch ahead: the same bits in the same order, and never into memory that is still being read."""

import gc

import pytest
import torch
from tiny import points
from torch.utils.data._utils.pin_memory import pin_memory

from speedkit.data.batch import Batch
from speedkit.data.prefetch import prefetched
from speedkit.plan import Plan
from speedkit.train.fit import fit

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_gpu
def test_a_batch_is_never_overwritten_while_it_is_read():
    device, size = torch.device("cuda"), 4_000_000
    source = (torch.full((size,), float(number)).pin_memory() for number in range(40))
    sums = []
    for (batch,) in prefetched(source, lambda rows: (rows.to(device, non_blocking=True),), device):
        torch.cuda._sleep(20_000_000)  # the reading comes long after the host has gone on and let go of the batch
        sums.append(batch.min() + batch.max())
        del batch
        gc.collect()
    assert [float(found) for found in sums] == [2.0 * number for number in range(40)]


@needs_gpu
@pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"cache": "ram"}, {"cache": "device"}], ids=str)
def test_copying_ahead_changes_no_loss(plan):
    options = {"device": "cuda", "progress": False, "deterministic": True}
    ahead = Plan(prefetch=True, pin_memory=True, log_every=1, **plan)
    assert fit(points(), plan=ahead, **options).loss == fit(points(), plan=Plan(log_every=1, **plan), **options).loss
    torch.use_deterministic_algorithms(False)


def test_dataloader_pins_all_tensors_of_a_batch(monkeypatch):
    """Of a class that it does not know it pins nothing, without a word."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch = Batch(torch.zeros(2), torch.ones(2), torch.ones(2), (torch.ones(2), torch.zeros(2)))
    assert isinstance(pin_memory(batch), Batch) and len(pinned) == 5
