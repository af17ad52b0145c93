"""Bucketing by length: every clip once, few shapes, little padding; and batches of clips of different lengths."""

import dataclasses
import itertools

import pytest
import torch
from tiny import points
from torch import nn

from speedkit.data import bucket
from speedkit.data.bucket import padded_lengths, padding_share
from speedkit.data.loader import BatchStream
from speedkit.data.samples import EpochOrder
from speedkit.errors import PlanError
from speedkit.hardware import this_machine
from speedkit.plan import Plan, resolve
from speedkit.train.fit import fit

CPU = torch.device("cpu")


def lengths_of(count, seed=0):
    """Lengths like those of speech: log-normal, 20 to 400."""
    spread = torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(0.6).add(4.2).exp()
    return spread.long().clamp(20, 400)


def length(item):
    return 3 + int(item.path) * 7 % 20


def load(item):
    return torch.full((2, length(item)), float(item.label)) + torch.arange(length(item)) / 40


def masked_loss(model, batch, recipe):
    inputs, lengths, targets = batch
    valid = torch.arange(inputs.shape[-1]) < lengths[:, None]
    outputs = model((inputs * valid[:, None]).sum(-1) / lengths[:, None])
    return nn.functional.cross_entropy(outputs, targets), outputs


def clips(**options):
    """Clips [2, T] of 3 to 22 frames."""
    return dataclasses.replace(
        points(**options),
        load=load,
        features=torch.Tensor.contiguous,
        length=length,
        model=lambda: nn.Linear(2, 2),
        loss=masked_loss,
        score=lambda outputs, batch: outputs.argmax(-1) == batch[-1],
    )


def stream(count, **plan):
    batches = BatchStream(clips(), clips().train, Plan(**plan), 16, 0, CPU)
    try:
        return [batches.next() for _ in range(count)]
    finally:
        batches.close()


def test_the_padded_lengths_are_those_with_least_padding(monkeypatch):
    monkeypatch.setattr(bucket, "SHAPES", 3)
    for seed in range(5):
        lengths = lengths_of(12, seed)

        def padded(edges, lengths=lengths):
            edges = torch.tensor(edges)
            return int(edges[torch.searchsorted(edges, lengths)].sum())

        others = itertools.combinations(sorted(set(lengths.tolist()) - {int(lengths.max())}), 2)
        best = min(padded([*chosen, int(lengths.max())]) for chosen in others)
        assert padded(padded_lengths(lengths).tolist()) == best


@pytest.mark.parametrize("lengths", [[5], [5, 5, 5], [7, 5], list(range(1, 1000))], ids=len)
def test_padded_lengths_hold_every_clip(lengths):
    found = padded_lengths(torch.tensor(lengths))
    assert 1 <= len(found) <= bucket.SHAPES
    assert int(found.max()) == max(lengths)
    assert found.tolist() == sorted(found.tolist())


def test_an_epoch_holds_every_clip_once_and_depends_on_seed_and_epoch_alone():
    lengths = lengths_of(500)
    order, again, plain = (EpochOrder(500, 16, 3, False, given) for given in (lengths, lengths, None))
    first = list(order)
    assert first == list(again) != list(plain)
    assert sorted(itertools.chain(*first)) == list(range(500))
    assert [len(batch) for batch in first] == [16] * 31 + [4]
    order.epoch = 1
    assert list(order) != first
    means = [float(lengths[batch].float().mean()) for batch in first[:-1]]
    assert means != sorted(means), "batches come in random order, not from short to long"


def test_drop_last_leaves_out_clips_of_every_length():
    lengths = lengths_of(4007)
    order = EpochOrder(4007, 16, 0, True, lengths)
    dropped = set()
    for order.epoch in range(20):
        dropped |= set(range(4007)) - set(itertools.chain(*order))
    left_out = lengths[sorted(dropped)]
    assert len(left_out) > 100
    assert float(left_out.float().mean()) == pytest.approx(float(lengths.float().mean()), rel=0.25)


def test_bucketing_pads_far_less_in_few_shapes():
    lengths = lengths_of(2000)
    grouped, plain = EpochOrder(2000, 16, 0, True, lengths), EpochOrder(2000, 16, 0, True)
    without = padding_share(plain.tensors(), lengths)
    with_buckets = padding_share(grouped.tensors(), lengths, grouped.padded)
    assert with_buckets < without / 2
    assert len(grouped.padded) <= bucket.SHAPES


def test_what_bucketing_saves_is_said(capsys):
    fit(clips(), plan=Plan(bucket=True), device="cpu", progress=True)
    assert "bucket: " in capsys.readouterr().out


def test_padding_share_counts_padded_frames():
    lengths = torch.tensor([2, 4, 6])
    assert padding_share([torch.tensor([0, 1]), torch.tensor([2])], lengths) == pytest.approx(2 / 14)
    assert padding_share([torch.tensor([0, 1])], lengths, torch.tensor([6])) == pytest.approx(6 / 12)


@pytest.mark.parametrize("plan", [{}, {"bucket": True}, {"bucket": True, "workers": 2}], ids=str)
def test_clips_of_different_lengths_come_padded_with_zeros_and_with_their_lengths(plan):
    shapes = set()
    for inputs, lengths, targets in stream(6, **plan):
        shapes.add(inputs.shape[-1])
        assert len(inputs) == len(lengths) == len(targets) == 16
        for row, valid, label in zip(inputs, lengths.tolist(), targets.tolist(), strict=True):
            assert torch.equal(row[:, :valid], label + torch.arange(valid).expand(2, -1) / 40)
            assert not row[:, valid:].any()
    if plan:
        assert shapes <= set(padded_lengths(torch.tensor([length(item) for item in clips().train])).tolist())


def test_training_on_bucketed_clips_is_the_same_with_workers_and_can_be_resumed(tmp_path):
    options = {"device": "cpu", "progress": False}
    plan = Plan(bucket=True, log_every=1)
    whole = fit(clips(), plan=plan, **options)
    assert fit(clips(), plan=dataclasses.replace(plan, workers=2), **options).loss == whole.loss
    assert fit(clips(), plan=dataclasses.replace(plan, bucket=False), **options).loss != whole.loss
    half = dataclasses.replace(plan, micro_batch=8)
    assert fit(clips(), plan=half, **options).loss == pytest.approx(whole.loss, rel=1e-4)


def test_clips_of_one_length_need_no_buckets_and_the_plan_says_so():
    (fallback,) = resolve(Plan(bucket=True), this_machine("cpu"), workload=points()).fallbacks
    assert (fallback.field, fallback.got) == ("bucket", False) and "one length" in fallback.why
    with pytest.raises(PlanError, match=r"--strict.*bucket"):
        resolve(Plan(bucket=True), this_machine("cpu"), strict=True, workload=points())
    assert resolve(Plan(bucket=True), this_machine("cpu"), workload=clips()).plan.bucket


# Several ranks.


@pytest.mark.parametrize("lengths", [None, lengths_of(101)], ids=["plain", "bucketed"])
@pytest.mark.parametrize("count", [96, 97, 101])
def test_ranks_share_every_batch_and_make_equally_many_steps(count, lengths):
    lengths = None if lengths is None else lengths[:count]
    alone = list(EpochOrder(count, 16, 0, False, lengths))
    ranks = [list(EpochOrder(count, 16, 0, False, lengths, rank, 4)) for rank in range(4)]
    assert [len(rank) for rank in ranks] == [len(alone)] * 4
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert all(parts)
        assert set(itertools.chain(*parts)) == set(whole)
        if len(whole) >= 4:
            assert len(list(itertools.chain(*parts))) == len(whole)
