"""The automatic batch size: every kind of out-of-memory is known, what is chosen fits, and nothing else is changed."""

import dataclasses
import functools
import gc
import itertools
import random

import numpy as np
import pytest
import torch
from faults import OUT_OF_MEMORY, chained, limited, strike
from tiny import emulating, features, loss, make_model, points, score, slowed, target
from torch import nn

from speedkit.data.decode import BadItem
from speedkit.data.sampler import padded_lengths
from speedkit.errors import PlanError, SpeedkitError
from speedkit.measure.larger_batch import choose_batch_size, judged
from speedkit.plan import Plan
from speedkit.recipe import Recipe, with_batch_size
from speedkit.train import batch_size
from speedkit.train.batch_size import even, knee, table_per_length
from speedkit.train.loop import begin, close, steps
from speedkit.train.oom import is_out_of_memory
from speedkit.train.run import finish, loss_under, make_learner
from speedkit.train.trial import peak_bytes, predicted, worst_case

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_is_not_looked_through():
    """A collection after each failure takes a fifth of a second with all of torch to look through, else nothing."""
    gc.freeze()
    yield
    gc.unfreeze()


def search(workload, plan=None, device="cpu", **options):
    """What a search finds, by timings too short to mean anything."""
    functions = (make_learner, loss_under)
    options = {"window_s": 1e-4, **options}
    return batch_size.search(workload, workload.recipe, plan or Plan(), torch.device(device), *functions, **options)


def noting(workload, seen):
    """The workload, whose loss adds to `seen`: whether it trained, the samples, and the last dimension of its batch."""

    def noted(model, batch, recipe):
        seen.append((model.training, len(batch[0]), batch[0].shape[-1]))
        return workload.loss(model, batch, recipe)

    return dataclasses.replace(workload, loss=noted)


# What is out of memory.


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_every_kind_of_out_of_memory_is_known(kind):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        strike(kind)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),  # no library reports it so
        chained(RuntimeError("the loss failed"), ValueError("no such class")),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_no_other_error_passes_for_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_chain_that_bites_its_tail_ends():
    first, second = RuntimeError("one"), RuntimeError("other")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


# The largest that fits.


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_the_search_finds_the_largest_below_every_kind_of_out_of_memory(kind, where):
    found = search(limited(points(), 6, kind, where))
    assert found.largest == 6
    assert max(found.rates) == 6
    assert found.micro_batch in found.rates
    assert set(found.refused) == {7, 8}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fits", [1, 2, 3, 15, 31, 32, 33, 47, 48, 100])
def test_the_largest_is_found_wherever_it_lies(fits, device):
    seen = []
    found = search(noting(limited(points(train=48, batch_size=48), fits), seen), device=device)
    assert found.largest == min(fits, 48)
    assert max(found.rates) == even(48, found.largest)  # as many parts, and the last no smaller than need be
    trained = {size for training, size, _ in seen if training}
    assert {found.micro_batch, found.largest, *found.rates} <= trained


@pytest.mark.parametrize(
    ("workload", "most"),
    [
        (points(batch_size=1), 1),
        (points(train=10, test=3, batch_size=16), 10),  # a training set smaller than a batch
        (points(train=1, test=1), 1),
    ],
    ids=["batch of one", "few items", "one item"],
)
def test_a_batch_is_never_larger_than_there_are_samples_for_it(workload, most):
    found = search(workload)
    assert (found.batch_size, found.largest) == (most, most)
    assert found.micro_batch <= most


def test_what_does_not_fit_at_all_says_so():
    with pytest.raises(SpeedkitError, match=r"micro-batch of 1 of the longest items does not fit .*CUDA out of memory"):
        search(limited(points(), 0))
    with pytest.raises(SpeedkitError, match="an evaluation of 16 of the longest items does not fit"):
        search(limited(points(), 8, where="evaluation"))


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("no such class")], ids=repr)
def test_an_error_that_is_not_about_memory_is_raised(error):
    with pytest.raises(type(error), match=str(error)):
        search(limited(points(), 4, raises=error))


def test_sizes_predicted_beyond_the_room_are_never_run():
    workload, seen = points(hidden=4096, batch_size=64), []
    whole = search(workload)
    room = (whole.peak_bytes[32] + whole.peak_bytes[64]) // 2  # for about 48
    found = search(noting(workload, seen), room_bytes=room)
    assert 40 <= found.largest <= 50
    assert all(size <= found.largest for training, size, _ in seen if training)
    assert max(found.peak_bytes.values()) <= room
    assert f"of {room / 1e6:.3g}" in found.refused[found.largest + 1]


def test_more_than_the_room_for_one_is_an_error():
    with pytest.raises(SpeedkitError, match=r"micro-batch of 1 .* does not fit"):
        search(points(hidden=4096), room_bytes=1000)


def test_a_size_that_makes_the_allocator_ask_again_does_not_fit(monkeypatch):
    seen = []
    over = lambda _: sum(training and size > 5 for training, size, _ in seen)  # noqa: E731 - counts, as CUDA's does
    monkeypatch.setattr("speedkit.train.trial.alloc_retries", over)
    found = search(noting(points(), seen))
    assert found.largest == 5
    assert "ask for it anew" in found.refused[6]


def test_the_peak_of_a_function_is_what_it_holds_at_once():
    kept = torch.ones(1 << 20)  # there before: not counted

    def function():
        first = torch.empty(1 << 20)
        second = kept + first
        del first
        third = torch.empty(1 << 18)
        return second, third

    assert peak_bytes(function, CPU) == 8 << 20  # the first two; then the last two


@pytest.mark.parametrize(
    ("known", "size", "expected"),
    [
        ({}, 8, 0),
        ({2: 100}, 8, 400),
        ({1: 60, 2: 100, 4: 180}, 8, 340),
        ({4: 180, 2: 100, 16: 9999}, 8, 340),  # only from below
        ({1: 100, 2: 90}, 4, 90),  # noise is no discount
    ],
    ids=str,
)
def test_memory_is_predicted_on_a_line(known, size, expected):
    assert predicted(known, size) == expected


# The knee.


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 10, 2: 20, 4: 40, 8: 80}, 8),  # not yet saturated
        ({1: 10, 2: 60, 4: 97, 8: 99, 16: 100}, 4),
        ({1: 100, 2: 100, 4: 100}, 1),  # nothing to gain
        ({4: 80, 8: 100, 16: 98, 32: 60}, 8),  # a cache overflows
        ({4: 98, 8: 90, 16: 100}, 4),  # a dip between: the smallest all the same
        ({7: 1.0}, 7),
    ],
    ids=str,
)
def test_the_knee_is_the_smallest_near_the_best(rates, expected):
    assert knee(rates) == expected


def test_even_parts_are_as_many_and_never_larger():
    for batch, size in itertools.product(range(1, 70), range(1, 70)):
        size = min(size, batch)
        assert 1 <= even(batch, size) <= size
        assert -(-batch // even(batch, size)) == -(-batch // size)


# Nothing else is changed.


def drawing_loss(model, batch, recipe):
    """A loss that draws from every global generator."""
    value, outputs = loss(model, batch, recipe)
    return value * (1 + random.random() + float(np.random.random()) + float(torch.rand(()))), outputs  # noqa: NPY002


def normalised(norm, **options):
    """The points, for a net that normalises by `norm` and drops out."""
    layers = lambda: nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))  # noqa: E731
    return dataclasses.replace(points(**options), model=layers)


def course(workload, **plan):
    """Micro-batch, losses, what training left behind (statistics, momentum, scale) and the state of all generators."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    run = begin(workload, plan=Plan(log_every=1, **plan), device="cpu", progress=False)
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # noqa: NPY002
    place = run.batches.epoch, run.batches.position
    for _ in steps(run):
        pass
    left = [*run.model.state_dict().values(), *(vars(run.scale).values() if run.scale else [])]
    left += [value for slot in run.optimizer.state.values() for value in slot.values()]
    history = finish(run)
    close(run)
    values = [found["value"] for found in history.evaluations]
    return run.plan.micro_batch, history.loss, [tensor.tolist() for tensor in left], states, place, values


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_run_with_auto_is_bit_identical_to_one_with_the_size_it_chose(norm, precision, monkeypatch):
    monkeypatch.setattr("speedkit.train.run.this_machine", emulating)
    workload = dataclasses.replace(normalised(norm, clip_norm=1.0), loss=drawing_loss)
    found = course(limited(workload, 6), micro_batch="auto", precision=precision)
    assert found[0] in (1, 2, 4, 6)
    assert found == course(workload, micro_batch=found[0], precision=precision)


def test_the_choice_is_told_with_its_reason():
    run = begin(limited(points(), 6), plan=Plan(micro_batch="auto"), device="cpu", progress=False)
    close(run)
    told = next(fallback for fallback in run.effective.fallbacks if fallback.field == "micro_batch")
    assert (told.asked, told.got) == ("auto", run.micro_batch)
    assert "6 is the largest that fits (7: CUDA out of memory" in told.why
    assert "tried, uncompiled: 1, 2, " in told.why


def test_batch_norm_gets_the_largest_and_never_one_sample():
    seen = []
    workload = normalised(nn.BatchNorm1d)
    assert search(noting(workload, seen)).micro_batch == 16
    assert min(size for training, size, _ in seen if training) == 2
    assert search(limited(workload, 7)).micro_batch == 6  # three parts, as with 7, but even
    assert "batch norm" in search(workload).why


# Lengths, and items that cannot be read.


def load_ramp(item):
    if item.path == "7":
        raise BadItem(item.path, "not a sound")
    return torch.ones(3 + int(item.path) % 5)


def pooled_loss(model, batch, recipe):
    inputs, lengths, targets = batch
    outputs = model((inputs.sum(dim=-1) / lengths)[:, None])
    return nn.functional.cross_entropy(outputs, targets), outputs


def ramps(**recipe):
    """Rows of 3 to 7 numbers; the 8th cannot be read."""
    return dataclasses.replace(
        points(train=40, **recipe),
        load=load_ramp,
        features=features,
        target=target,
        loss=pooled_loss,
        score=score,
        model=functools.partial(make_model, 1, 4, 2),
        length=lambda item: 3 + int(item.path) % 5,
    )


def test_the_batch_tried_is_of_the_longest_readable_items():
    workload = ramps()
    inputs, lengths, targets = worst_case(workload, workload.train, Plan(), 10, CPU)
    assert inputs.shape == (10, 7)
    assert lengths.tolist() == [7] * 8 + [6] * 2
    assert len(targets) == 10
    everything = worst_case(workload, workload.train, Plan(), 100, CPU)
    assert len(everything[0]) == 39
    with pytest.raises(SpeedkitError, match="no readable item"):
        worst_case(workload, workload.train[7:8], Plan(), 4, CPU)


def test_a_bucketed_workload_gets_a_size_per_length():
    seen = []
    workload = ramps(batch_size=8)

    def room_for_30_numbers(model, batch, recipe):
        if model.training and batch[0].numel() > 30:
            strike("cuda")
        return pooled_loss(model, batch, recipe)

    workload = noting(dataclasses.replace(workload, loss=room_for_30_numbers), seen)
    functions = (make_learner, loss_under)
    table = table_per_length(workload, workload.recipe, Plan(bucket=True), CPU, *functions, window_s=1e-4)
    lengths = torch.tensor([workload.length(item) for item in workload.train])
    assert list(table) == padded_lengths(lengths) == [3, 4, 5, 6, 7]
    assert [found.largest for found in table.values()] == [8, 7, 6, 5, 4]
    for length, found in table.items():
        assert (True, found.micro_batch, length) in seen


# A larger batch of the recipe.


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 2e-3), ("sgd", 4e-3)])
def test_a_larger_batch_has_its_learning_rate_and_as_many_samples(optimizer, rate):
    by_steps = with_batch_size(Recipe(optimizer=optimizer, epochs=None, steps=100), 128)
    assert (by_steps.batch_size, by_steps.steps) == (128, 25)
    assert by_steps.learning_rate == pytest.approx(rate)
    by_epochs = with_batch_size(Recipe(optimizer=optimizer), 128)
    assert (by_epochs.epochs, by_epochs.steps) == (8, None)
    assert with_batch_size(by_epochs, 32) == Recipe(optimizer=optimizer)  # and back


def curves(*runs):
    """Curves of one point each, [seconds, accuracy]."""
    return [{"points": [[seconds, value]], "value": value, "seconds": seconds} for seconds, value in runs]


@pytest.mark.parametrize(
    ("final", "taken", "why"),
    [
        ([(5, 0.90), (5, 0.91), (5, 0.90)], True, "sooner with every seed, and as good"),
        ([(5, 0.90), (5, 0.91), (11, 0.90)], False, "not sooner with every seed"),
        ([(5, 0.90), (5, 0.70), (5, 0.90)], False, "not shown to be as good within 0.02"),
        ([(5, 0.50), (5, 0.50), (5, 0.50)], False, "not shown to be as good"),  # never gets there
    ],
    ids=["better", "one seed slower", "one seed worse", "all worse"],
)
def test_a_larger_batch_is_judged_by_time_to_quality(final, taken, why):
    row = judged(points(), {"baseline": curves((10, 0.90), (10, 0.91), (10, 0.90)), "final": curves(*final)})
    assert row["taken"] == taken
    assert why in row["why"]


def test_batch_size_auto_trains_to_choose_and_begins_nothing_else():
    # Every step waits, so that fewer steps are sooner; the classes lie far apart, so that all are as good.
    workload = slowed(points(size=64, epochs=4), 0.005)
    auto = dataclasses.replace(workload.recipe, batch_size="auto")
    with pytest.raises(PlanError, match="choose_batch_size"):
        begin(workload, auto, device="cpu")
    lines = []
    chosen, rows = choose_batch_size(workload, auto, factors=(2, 64), seeds=2, device="cpu", say=lines.append)
    assert [row["batch_size"] for row in rows] == [32]  # with 64 times as many too few steps would be left
    assert rows[0]["taken"]
    assert chosen == with_batch_size(workload.recipe, 32)
    assert len(lines) == 2
