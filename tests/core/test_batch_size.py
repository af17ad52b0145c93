"""The automatic micro-batch: every kind of out-of-memory is known, what is chosen fits, and nothing else is changed."""

import contextlib
import dataclasses
import functools
import gc

import psutil
import pytest
import torch
from faults import OUT_OF_MEMORY, limited, strike
from tiny import every_number_format, points
from torch import nn

from speedkit import machine
from speedkit.data.decode import BadItem
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.train import micro_batch
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.memory import is_out_of_memory
from speedkit.train.micro_batch import find_micro_batch, knee, micro_batch_for, preallocate
from speedkit.train.setup import setup_run

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_is_not_looked_through():
    """A collection after each failure takes a fifth of a second with all of torch to look through, else nothing."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def timings_too_short_to_mean_anything(monkeypatch):
    monkeypatch.setattr(micro_batch, "ROUNDS", 1)


def search(workload, plan=None, device="cpu", **options):
    options |= {"device": torch.device(device), "make_run": setup_run}
    return micro_batch_for(workload, workload.recipe, plan or Plan(), **options)


def noting(workload, seen):
    """The workload, whose loss adds to `seen` how many samples of which last dimension it trained on."""

    def noted(model, batch, recipe):
        seen.append((len(batch[0]), batch[0].shape[-1]))
        return workload.loss(model, batch, recipe)

    return dataclasses.replace(workload, loss=noted)


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_every_kind_of_out_of_memory_is_known(kind):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        strike(kind)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


# --- what fits


@pytest.mark.parametrize("device", DEVICES)
def test_the_micro_batch_of_a_loop_of_ones_own_is_found(device):
    model = nn.Linear(8, 4096).to(device)

    def step(batch):
        if len(batch) * batch.shape[1] > 16:
            strike("cuda")
        model(batch).square().mean().backward()

    def batch_of(size, length):
        return torch.ones(size, length, 8, device=device)

    found = {length: find_micro_batch(step, functools.partial(batch_of, length=length), 8) for length in (2, 4)}
    assert [list(search.rates) for search in found.values()] == [[1, 2, 4, 8], [1, 2, 4]]
    assert found[4].largest == 4 and found[4].micro_batch in found[4].rates and "8 does not fit" in found[4].why
    assert found[2].peak_bytes[8] > found[2].peak_bytes[1] >= 2 * 4096 * 4
    with pytest.raises(SpeedkitError, match="not even the longest"):
        find_micro_batch(step, functools.partial(batch_of, length=32), 8)


def test_free_memory_is_what_the_limit_of_a_container_leaves(monkeypatch):
    limit_bytes = psutil.Process().memory_info().rss + (64 << 20)
    monkeypatch.setattr(machine, "usable_ram_bytes", lambda: limit_bytes)
    assert 0 < machine.free_bytes(torch.device("cpu")) < 128 << 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fits", "kind", "where"), [(1, "cuda", "forward"), (24, "cudnn", "backward")])
def test_sizes_double_until_one_does_not_fit(fits, kind, where, device):
    result = search(limited(points(train=48, batch_size=48), fits, kind, where), device=device)
    assert [*result.rates] == [size for size in (1, 2, 3, 6, 12, 24, 48) if size <= fits]
    assert result.largest == fits and result.micro_batch in result.rates and f"{2 * fits} does not fit" in result.why


def test_what_cannot_be_searched_says_so():
    with pytest.raises(SpeedkitError, match="not even the longest items"):
        search(points(hidden=4096), room_bytes=1000)
    with pytest.raises(RuntimeError, match="bad shapes"):
        search(limited(points(), 4, raises=RuntimeError("bad shapes")))


def test_a_size_that_could_need_more_than_the_room_is_never_run_on_a_cpu():
    workload, sizes = points(hidden=4096, batch_size=64), []
    whole = search(workload)
    assert whole.largest == 64
    room = (whole.peak_bytes[16] + whole.peak_bytes[32]) // 2
    result = search(noting(workload, sizes), room_bytes=room)
    assert result.largest == max(size for size, _ in sizes) == 16
    assert max(result.peak_bytes.values()) <= room and "32 does not fit" in result.why


def test_the_knee_is_the_smallest_near_the_best():
    assert knee({1: 10, 2: 60, 4: 97, 8: 99, 16: 100}) == 4
    assert knee({4: 80, 8: 100, 16: 98, 32: 60}) == 8  # a cache overflows


# --- nothing else is changed


def normalised(norm, **options):
    """The points, for a net that normalises by `norm` and drops out."""

    def net():
        return nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    return dataclasses.replace(points(**options), model=net)


@pytest.mark.parametrize(("precision", "norm"), [("fp16", nn.LayerNorm), ("fp32", nn.BatchNorm1d)])
def test_a_run_with_auto_is_bit_identical_to_one_with_the_size_it_chose(norm, precision):
    workload, plan = normalised(norm, clip_norm=1.0), Plan(log_every=1, precision=precision, micro_batch="auto")
    with every_number_format():
        auto = fit(limited(workload, 4), plan=plan, device="cpu", progress=False)
    (choice,) = (fallback for fallback in auto.effective.fallbacks if fallback.field == "micro_batch")
    assert choice.asked == "auto" and choice.got in (1, 2, 4) and "of" in choice.why
    plan = dataclasses.replace(plan, micro_batch=choice.got)
    with every_number_format():
        fixed = fit(workload, plan=plan, device="cpu", progress=False)
    assert auto.loss == fixed.loss and auto.evaluation["value"] == fixed.evaluation["value"]
    assert all(map(torch.equal, auto.model.state_dict().values(), fixed.model.state_dict().values()))


def test_batch_norm_gets_the_largest_and_never_one_sample():
    seen = []
    workload = normalised(nn.BatchNorm1d)
    assert search(noting(workload, seen)).micro_batch == 16
    assert min(size for size, _ in seen) == 2
    result = search(limited(workload, 7))
    assert result.micro_batch == 4 and "batch norm" in result.why


def load_ramp(item):
    if item.path == "4":
        raise BadItem(item.path, "not a sound")
    return torch.ones(3 + int(item.path) % 5)


def pooled_loss(model, batch, recipe):
    inputs, _, targets = batch
    outputs = model(inputs.mean(dim=-1, keepdim=True).expand(-1, 8))
    return nn.functional.cross_entropy(outputs, targets), outputs


def test_sizes_are_tried_on_the_longest_readable_items():
    sizes = []
    # 3 to 7 numbers each; of the 8 longest one cannot be read
    ramps = dataclasses.replace(points(train=40, batch_size=8), load=load_ramp, loss=pooled_loss)
    ramps = dataclasses.replace(ramps, length=lambda item: 3 + int(item.path) % 5)
    assert search(noting(ramps, sizes)).largest == 8
    assert {length for _, length in sizes} == {7}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_memory_taken_first_for_the_longest_batch_leaves_no_trace(norm):
    lengths = []
    ramps = dataclasses.replace(normalised(norm, train=40, batch_size=8, clip_norm=1.0), load=load_ramp)
    ramps = dataclasses.replace(ramps, loss=pooled_loss, length=lambda item: 3 + int(item.path) % 5)
    outcomes = []
    for first in (False, True):
        run = setup_run(noting(ramps, lengths), plan=Plan(log_every=1, micro_batch=4), device="cpu", progress=False)
        with contextlib.closing(run):
            if first:
                lengths.clear()
                preallocate(run)
                assert lengths == [(3, 7)], "the longest of four, as many as a pass takes, that can be read"
            for _ in steps(run):
                pass
        outcomes.append(([*run.model.state_dict().values(), torch.get_rng_state()], run.history.loss))
    assert all(map(torch.equal, outcomes[0][0], outcomes[1][0])) and outcomes[0][1] == outcomes[1][1]
    with contextlib.closing(setup_run(limited(ramps, 0), device="cpu", progress=False)) as run:
        preallocate(run)  # what does not fit is no error: no batch of the training may be so long
