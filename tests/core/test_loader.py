"""Loading: one order for every plan, unreadable files left out and named, worker processes that end and can rest."""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import random

import numpy as np
import psutil
import pytest
import torch
from tiny import load, points

from speedkit.data.batch import tensors_of
from speedkit.data.batches import set_running
from speedkit.data.loader import BatchStream
from speedkit.data.sampler import BatchSampler, padded_lengths, shuffled
from speedkit.errors import BadItem, PlanError, SpeedkitError
from speedkit.plan import Plan
from speedkit.train.fit import fit

CPU = torch.device("cpu")
QUIET = {"device": "cpu", "progress": False}
LOADERS = [{}, {"workers": 2}, {"workers": 2, "persistent_workers": True, "prefetch_factor": 1}]


def open_stream(workload, seed=0, drop_last=False, **plan):
    options = {"batch_size": 16, "seed": seed, "drop_last": drop_last, "device": CPU}
    return BatchStream(workload, workload.train, Plan(**plan), **options)


def take(count, workload=None, **options):
    """The first `count` batches of the points."""
    stream = open_stream(workload or points(), **options)
    try:
        return list(itertools.islice(stream, count))
    finally:
        stream.close()


def same(batches, expected):
    """Whether they hold the same tensors."""
    mine, theirs = ([tensor for batch in side for tensor in tensors_of(batch)] for side in (batches, expected))
    return all(map(torch.equal, mine, theirs)) and len(mine) == len(theirs)


# Order.


def test_each_epoch_holds_every_item_once_and_drop_last_leaves_out_the_rest():
    workload = points(train=100)
    batches = take(14, workload)  # 6 of 16 and 1 of 4, twice
    assert [len(batch.inputs) for batch in batches] == [16, 16, 16, 16, 16, 16, 4] * 2
    epochs = [torch.cat([batch.inputs for batch in part]) for part in (batches[:7], batches[7:])]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(dim=0).values for epoch in epochs))
    assert {len(batch.inputs) for batch in take(14, workload, drop_last=True)} == {16}
    assert torch.equal(epochs[0], torch.stack([2 * load(workload.train[index], 8) for index in shuffled(100, 0, 0)]))
    in_order = open_stream(workload, seed=None)
    assert sum(len(batch.inputs) for batch in in_order.one_epoch()) == 100 and len(in_order) == 7


def test_loader_processes_are_copies_where_others_are_the_default():  # as in Python 3.14
    workload, default = (
        dataclasses.replace(points(), load=lambda item: load(item, 8)),
        multiprocessing.get_start_method(),
    )
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert same(take(2, workload, workers=2), take(2))
    finally:
        multiprocessing.set_start_method(default, force=True)


@pytest.mark.parametrize("plan", LOADERS, ids=str)
def test_a_stream_goes_on_from_any_place_and_loads_nothing_twice(plan, tmp_path):
    whole, order = take(12), shuffled(96, seed=0, epoch=0).tolist()
    noted = functools.partial(load_noted, path=tmp_path / "loaded")
    stream, random_state = open_stream(dataclasses.replace(points(), load=noted), **plan), torch.get_rng_state()
    stream.position = 4  # of 6 batches of 16
    assert same([next(stream), next(stream)], whole[4:6])
    loaded = [int(line) for line in (tmp_path / "loaded").read_text().split()]
    assert sorted(loaded[:32]) == sorted(order[64:])
    assert same([next(stream), next(stream)], whole[6:8]) and (stream.epoch, stream.position) == (1, 2)
    stream.epoch, stream.position = 0, 5  # back, as after a roll-back
    assert same([next(stream), next(stream)], whole[5:7])
    batch, names = stream.batch_at(0, 2)
    assert same([batch], whole[1:2]) and names == [str(index) for index in order[16:32]]
    assert same([next(stream)], whole[7:8])
    stream.close()
    assert torch.equal(torch.get_rng_state(), random_state), "no global generator is drawn from"


def load_noted(item, path):
    with path.open("a") as file:
        file.write(f"{item.path}\n")
    return load(item, 8)


@pytest.mark.parametrize("kind", ["plain", "bucketed", "of_frames"])
@pytest.mark.parametrize("count", [96, 97, 101])
def test_ranks_share_every_batch_and_make_equally_many_steps(count, kind):
    lengths = None if kind == "plain" else torch.arange(count) % 40 + 5
    options = {"lengths": lengths, "of_frames": kind == "of_frames"}
    alone = list(BatchSampler(count, 16, 0, **options))
    samplers = [BatchSampler(count, 16, 0, **options, rank=rank, world_size=4) for rank in range(4)]
    for position, (whole, *parts) in enumerate(zip(alone, *samplers, strict=True), 1):
        counted = [part for part, own in zip(parts, samplers, strict=True) if own.rank < own.size(position)]
        assert samplers[0].size(position) == len(whole)
        assert all(parts) and sorted(itertools.chain(*counted)) == sorted(whole)


# Unreadable items.


def load_unless_bad(item, bad):
    if item.path in bad:
        raise BadItem(item.path, "it is not audio")
    return load(item, 8)


def with_bad(bad, **options):
    """The points, of which those whose path is in `bad` cannot be read."""
    loading = functools.partial(load_unless_bad, bad=frozenset(bad))
    return dataclasses.replace(points(**options), load=loading, parameters={"size": 8, "bad": sorted(bad)})


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"cache": "ram"}], ids=str)
def test_an_unreadable_item_is_left_out_and_named_and_training_goes_on(tmp_path, plan):
    workload = with_bad({"3", "40", "101"})  # two of 96 to train on, one of 32 to test on
    history = fit(workload, plan=Plan(log_every=1, **plan), out=tmp_path, **QUIET)
    assert (history.steps, history.evaluation["n"]) == (12, 31)
    assert history.loss == fit(workload, plan=Plan(log_every=1), **QUIET).loss
    lines = (tmp_path / "quarantine.csv").read_text().splitlines()
    assert lines == ["path,why", "101,it is not audio", "3,it is not audio", "40,it is not audio"]


@pytest.mark.parametrize("plan", [{}, {"cache": "ram"}], ids=str)
def test_a_batch_of_unreadable_items_is_passed_over_and_too_many_or_none_are_an_error(plan):
    first = str(shuffled(96, seed=0, epoch=0)[0].item())
    assert fit(with_bad({first}, batch_size=1), plan=Plan(**plan), **QUIET).steps == 192
    for bad in (range(10, 15), range(96)):  # more than 5 %
        with pytest.raises(SpeedkitError, match=r"cannot be used, over 5%.*\d+.*: it is not audio"):
            fit(with_bad({str(number) for number in bad}), plan=Plan(**plan), **QUIET)
    with pytest.raises(SpeedkitError, match="points has no readable item"):
        fit(dataclasses.replace(points(), train=[]), plan=Plan(**plan), **QUIET)


# What workers may do, and that they rest.


def draw(item):
    drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
    return torch.tensor(drawn + [0.0] * 5, requires_grad=True).clone()


def test_no_two_items_get_the_same_random_numbers_in_workers_and_a_gradient_s_history_stays_there():
    drawn = torch.cat([batch.inputs for batch in take(12, dataclasses.replace(points(), load=draw), workers=2)])
    assert [len(column.unique()) for column in drawn.T[:3]] == [192] * 3 and not drawn.requires_grad  # of two epochs


def test_stop_iteration_in_the_training_process_does_not_end_the_epoch():
    with pytest.raises(SpeedkitError, match="StopIteration"):
        take(6, dataclasses.replace(points(), load=lambda item: next(iter(()))))


def test_paused_processes_stand_still_go_on_where_they_were_and_can_be_closed():
    stream = open_stream(points(), workers=2, persistent_workers=True)
    batches, workers = [next(stream)], [psutil.Process(process.pid) for process in stream.loader.detector.processes]
    for _ in range(2):
        set_running(stream.loader.detector.processes, False)
        for worker in workers:
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)  # until the kernel reports it
        assert [worker.status() for worker in workers] == [psutil.STATUS_STOPPED] * 2
        set_running(stream.loader.detector.processes, True)
        batches += [next(stream) for _ in range(5)]
    assert same(batches, take(11))  # of two epochs, with the same workers
    set_running(stream.loader.detector.processes, False)
    stream.close()
    assert not any(worker.is_running() for worker in workers)


# Features on the device, and the decoder.


def add_noise(waveforms, generator):
    return waveforms + torch.randn(waveforms.shape, generator=generator, device=waveforms.device)


def test_waveforms_are_augmented_in_training_alone_and_alike_for_any_workers_and_any_start():
    workload = dataclasses.replace(points(), augment_waveform=add_noise)
    noisy, plain = take(7, workload, features_on="device"), take(7)
    assert same(take(7, features_on="device"), plain) and not torch.equal(noisy[0].inputs, plain[0].inputs)
    assert same(take(7, workload, features_on="device", workers=2), noisy)
    stream = open_stream(workload, features_on="device")
    stream.position = 4
    assert same([next(stream)], noisy[4:5]) and same([stream.batch_at(0, 2)[0]], noisy[1:2])
    assert same(*(open_stream(each, seed=None, features_on="device").one_epoch() for each in (workload, points())))


def decode(item, decoder="soundfile"):
    return load(item, 8) + (decoder == "torchcodec")


def test_the_decoder_of_the_plan_reaches_the_workload_or_is_refused():
    workload = dataclasses.replace(points(), load=decode, decoders=("torchcodec",))
    [plain] = take(1, workload)
    [other] = take(1, workload, decoder="torchcodec", workers=1)
    assert torch.equal(plain.inputs + 2, other.inputs)
    with pytest.raises(PlanError, match="decoder=torchcodec"):
        take(1, decoder="torchcodec")


# Clips of different lengths.


def lengths_of(count, seed=0):
    """Lengths like those of speech: log-normal, 20 to 400."""
    spread = torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(0.6).add(4.2).exp()
    return spread.long().clamp(20, 400)


def clip_length(item):
    return 3 + int(item.path) * 7 % 20


def load_clip(item):
    return torch.full((2, clip_length(item)), float(item.label)) + torch.arange(clip_length(item)) / 40


def clips():
    """Clips [2, T] of 3 to 22 frames."""
    return dataclasses.replace(points(), load=load_clip, features=torch.Tensor.contiguous, length=clip_length)


def test_the_padded_lengths_are_those_with_least_padding():
    for seed in range(5):
        lengths = lengths_of(12, seed)
        longest = int(lengths.max())

        def padded(edges, lengths=lengths):
            return sum(min(edge for edge in edges if edge >= length) for length in lengths.tolist())

        others = itertools.combinations(sorted({*lengths.tolist()} - {longest}), 2)
        assert padded(padded_lengths(lengths, 3)) == min(padded([*edges, longest]) for edges in others)
    assert padded_lengths(torch.tensor([5, 5]), 8) == [5]
    # On a GPU in multiples, but no longer than the longest clip.
    rounded = BatchSampler(4, 2, 0, lengths=torch.tensor([5, 33, 40, 70]), multiple=32)
    assert [rounded.padded_to(length) for length in (5, 33, 40, 70)] == [32, 64, 64, 70]


def test_a_bucketed_epoch_holds_every_clip_once_in_random_order_with_little_padding():
    lengths = lengths_of(500)
    grouped, again, plain = (BatchSampler(500, 16, 3, lengths=given) for given in (lengths, lengths, None))
    first = list(grouped)
    assert first == list(again) != list(plain)
    assert sorted(itertools.chain(*first)) == list(range(500)) and [len(batch) for batch in first] == [16] * 31 + [4]
    means = [float(lengths[batch].float().mean()) for batch in first[:-1]]
    assert means != sorted(means), "batches come in random order, not from short to long"

    def frames(sampler):
        return sum(len(batch) * sampler.padded_to(int(lengths[batch].max())) for batch in sampler.batches())

    assert frames(grouped) < 0.7 * frames(plain)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_equally_many_frames_make_as_many_steps_with_every_clip_in_few_shapes(drop_last):
    lengths = lengths_of(500)
    sampler, plain = (
        BatchSampler(500, 16, 3, drop_last=drop_last, lengths=lengths, of_frames=of_frames)
        for of_frames in (True, False)
    )
    batches = list(sampler)
    assert len(batches) == len(plain) and sorted(itertools.chain(*batches)) == list(range(500))

    def frames(sampler):  # of each batch
        return [len(batch) * sampler.padded_to(int(lengths[batch].max())) for batch in sampler.batches()]

    assert max(frames(sampler)) < 2 * min(frames(sampler)) and max(frames(plain)) > 4 * min(frames(plain))
    assert sum(frames(sampler)) < 1.1 * sum(frames(plain))
    shapes = {(len(batch), sampler.padded_to(int(lengths[batch].max()))) for batch in batches}
    assert len(shapes) <= len(sampler.padded) + 1
    sampler.epoch = 1
    assert list(sampler) != batches and sorted(itertools.chain(*sampler)) == list(range(500))


@pytest.mark.parametrize(
    "lengths", [[5], [5, 5, 5], [1, 100], [3, 3, 3, 900], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]], ids=str
)
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_no_batch_of_frames_is_empty_where_clips_are_few(lengths, batch_size):
    sampler = BatchSampler(len(lengths), batch_size, 0, lengths=torch.tensor(lengths), of_frames=True)
    batches = list(sampler)
    assert len(batches) == len(sampler) and all(batches)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))


def test_clips_of_different_lengths_come_padded_with_zeros_and_with_their_lengths():
    shapes = set()
    for batch in take(6, clips(), bucket=True, workers=2):
        inputs, targets, lengths = batch.inputs, batch.targets, batch.lengths
        shapes.add(inputs.shape[-1])
        for row, valid, label in zip(inputs, lengths.tolist(), targets.tolist(), strict=True):
            assert torch.equal(row[:, :valid], label + torch.arange(valid).expand(2, -1) / 40)
            assert not row[:, valid:].any()
    assert shapes <= set(padded_lengths(torch.tensor([clip_length(item) for item in clips().train]), 8))
