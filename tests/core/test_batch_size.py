"""The micro-batch found by trying: out-of-memory is known, what is chosen fits, and nothing else is changed."""

import dataclasses
import gc

import psutil
import pytest
import torch
from faults import OUT_OF_MEMORY, limited, strike
from tiny import DEVICES, calling, outcome, points, trained
from torch import nn

from speedkit import find_micro_batch, machine
from speedkit.errors import BadItem, SpeedkitError
from speedkit.plan import Plan
from speedkit.train.memory import is_out_of_memory
from speedkit.train.micro_batch import largest_of_fastest, micro_batch_for
from speedkit.train.setup import setup_run


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_is_not_looked_through():
    """A collection after each failure takes a fifth of a second with all of torch to look through, else nothing."""
    gc.freeze()
    yield
    gc.unfreeze()


def search(workload):
    return micro_batch_for(workload, workload.recipe, Plan(), device=torch.device("cpu"), make_run=setup_run)


def noting(workload, seen):
    """The workload, whose loss adds to `seen` how many samples of which last dimension it trained on."""
    return calling(workload, lambda model, batch: seen.append((len(batch.inputs), batch.inputs.shape[-1])))


# --- what fits


def training_step(fits=64, kind="cuda", device="cpu", seen=None):
    """A step of 64 samples of a loop of one's own, which runs out of memory in micro-batches larger than `fits`."""
    model = nn.Linear(8, 4096).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(64, 8, device=device)

    def step(size):
        if seen is not None:
            seen.append(size)
        if size > fits:
            strike(kind)
        torch.rand(1)
        for part in inputs.split(size):
            (model(part).square().mean() * len(part) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_after_every_kind_of_out_of_memory_the_search_is_among_what_fits(kind, device):
    found = find_micro_batch(training_step(4, kind, device), 64, device=device)
    assert [*found.peak_bytes] == [*found.seconds] == [1, 2, 4] and "8 does not fit" in found.why
    assert found.micro_batch * found.accumulation_steps == 64


@pytest.mark.parametrize(
    "said",
    [
        "shapes cannot be multiplied",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear ...",
        "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_what_a_smaller_batch_does_not_cure_is_no_out_of_memory(said):
    assert not is_out_of_memory(RuntimeError(said))


def test_what_cannot_be_searched_says_so():
    with pytest.raises(RuntimeError, match="bad shapes"):
        search(limited(points(), 4, raises=RuntimeError("bad shapes")))
    for fits, room_bytes in ((0, None), (64, 1000)):
        with pytest.raises(SpeedkitError, match="not even the longest items"):
            find_micro_batch(training_step(fits), 64, device="cpu", room_bytes=room_bytes)


def test_a_size_that_could_need_more_than_the_room_is_never_run_on_a_cpu():
    step, before = training_step(), torch.get_rng_state()
    peaks, seen = find_micro_batch(step, 64, device="cpu").peak_bytes, []
    assert [*peaks] == [1, 2, 4, 8, 16, 32, 64] and torch.equal(torch.get_rng_state(), before)
    room_bytes = (peaks[16] + peaks[32]) / 2
    found = find_micro_batch(training_step(seen=seen), 64, device="cpu", room_bytes=room_bytes)
    assert max(found.peak_bytes) == max(seen) == 16 and max(found.peak_bytes.values()) <= room_bytes


def test_free_memory_is_what_the_limit_of_a_container_leaves(monkeypatch):
    limit_bytes = psutil.Process().memory_info().rss + (64 << 20)
    monkeypatch.setattr(machine, "usable_ram_bytes", lambda: limit_bytes)
    assert 0 < machine.free_bytes(torch.device("cpu")) < 128 << 20


def test_the_largest_of_the_fastest_is_chosen():
    assert largest_of_fastest({16: 1.0, 32: 1.02, 64: 1.13}) == 32
    assert largest_of_fastest({16: 1.13, 32: 1.13, 64: 1.0}) == 64


# --- nothing else is changed


def normalised(norm, **options):
    """The points, for a net that normalises by `norm` and drops out."""

    def net():
        return nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    return dataclasses.replace(points(**options), model=net)


@pytest.mark.usefixtures("every_format")
@pytest.mark.parametrize(("precision", "norm"), [("fp16", nn.LayerNorm), ("fp32", nn.BatchNorm1d)])
def test_a_run_with_auto_is_bit_identical_to_one_with_the_size_it_chose(norm, precision):
    workload, plan = normalised(norm, clip_norm=1.0), Plan(log_every=1, precision=precision, micro_batch="auto")
    auto = trained(limited(workload, 4), plan=plan)
    (choice,) = (fallback for fallback in auto.effective.fallbacks if fallback.field == "micro_batch")
    assert choice.asked == "auto" and choice.got in (1, 2, 4) and "of" in choice.why
    plan = dataclasses.replace(plan, micro_batch=choice.got)
    fixed = trained(workload, plan=plan)
    assert auto.loss == fixed.loss and outcome(auto) == outcome(fixed)


def test_batch_norm_gets_the_largest_and_never_one_sample():
    seen = []
    found = search(noting(normalised(nn.BatchNorm1d, batch_size=10), seen))  # 3, 3, 3 and 1
    assert found.micro_batch == 10 and {size for size, _ in seen} == {2, 5, 10}
    found = search(limited(normalised(nn.BatchNorm1d), 7))
    assert found.micro_batch == 4 and "batch norm" in found.why


def load_ramp(item):
    if item.path == "31":
        raise BadItem(item.path, "not a sound")
    return torch.ones(3 + int(item.path) // 10)


def pooled_loss(model, batch, recipe):
    outputs = model(batch.inputs.mean(dim=-1, keepdim=True).expand(-1, 8))
    return nn.functional.cross_entropy(outputs, batch.targets), outputs


def test_sizes_are_tried_on_the_longest_readable_items():
    sizes = []
    # 3 to 6 numbers each, in the test set more; of the 8 longest one cannot be read
    ramps = dataclasses.replace(points(train=40, batch_size=8), load=load_ramp, loss=pooled_loss)
    ramps = dataclasses.replace(ramps, length=lambda item: 3 + int(item.path) // 10)
    assert max(search(noting(ramps, sizes)).peak_bytes) == 8
    assert {length for _, length in sizes} == {6}
