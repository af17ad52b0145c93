"""The speech workload: masks that leave padding alone, a net that never sees it, and what it learns."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from tiny import trained

from speedkit.lab.workloads.speech import BANDS, BLOCK, RECIPE, SIZES, SPAN, SpeechNet, augment, loss, masked, speech
from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.precision import Precision
from speedkit.train.setup import transform_model
from speedkit.workload import Batch


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    made = SpeechNet(SIZES["tiny"])
    for block in made.blocks:  # at first the biases are zero, and padding that leaks would be, too
        torch.nn.init.normal_(block.conv_module.widen[0].bias)
    return made.eval()


def batch_of(*lengths, padded=None):
    """A batch of clips of so many frames, each by its place in the batch; padded to the longest or to `padded`."""
    longest, generator = padded or max(lengths), torch.Generator().manual_seed(0)
    rows = [F.pad(torch.randn(BANDS, n, generator=generator), (0, longest - n)) for n in lengths]
    return Batch(torch.stack(rows), torch.zeros(len(lengths), dtype=torch.long), torch.tensor(lengths))


def test_lengths_are_known_before_a_clip_is_decoded_and_those_that_are_too_long_are_named(tmp_path):
    draw, rates_hz = np.random.default_rng(0), (8000, 8000, 22050)
    for number, duration_s in enumerate((0.6, 1.0, 0.3, 2.0, 0.8, 0.7)):
        rate_hz = rates_hz[number % 3]
        soundfile.write(tmp_path / f"{number}.wav", draw.uniform(-0.5, 0.5, int(duration_s * rate_hz)), rate_hz)
    mine = speech(tmp_path, test_pattern=r"^[0-2]\.")
    for item in (*mine.train, *mine.test):
        features = mine.features(mine.load(item))
        assert features.shape == (BANDS, mine.length(item)) and features.shape[1] % 4 == 0
        assert features.isfinite().all() and features.mean(dim=1).abs().max() < 1e-4
    assert mine.length(mine.test[2]) == 4 * BLOCK  # 0.3 s, and silence up to 0.4
    shorter = speech(tmp_path, max_duration_s=0.9)
    assert len(shorter.train) + len(shorter.test) == 4
    why = "it lasts over 0.9 s (max_duration_s)"
    assert shorter.quarantined == {str(tmp_path / name): why for name in ("1.wav", "3.wav")}


def inside_segments(query, key, value, ends, *_):
    """Attention inside each segment, one after another: what CUDA's kernel makes of all at once."""
    segments = [slice(*pair) for pair in itertools.pairwise(ends.tolist())]
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))  # [H, B * N, E]
    attended = [F.scaled_dot_product_attention(query[:, at], key[:, at], value[:, at]) for at in segments]
    return torch.cat(attended, dim=1).transpose(0, 1)


@pytest.mark.parametrize("padded", [280, 333])
def test_attention_by_the_ends_of_clips_is_that_by_a_mask(net, padded, monkeypatch):
    monkeypatch.setattr("speedkit.lab.workloads.speech.varlen_attn", inside_segments)
    batch, results = batch_of(40, 280, 120, 44, padded=padded), []
    for plan in (Plan(), Plan(attention="varlen")):
        model = copy.deepcopy(net)
        assert transform_model(model, plan, precision=Precision(plan, torch.device("cpu"))) == []
        loss(model, batch, RECIPE)[0].backward()
        results.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*results)
    [fallback] = transform_model(torch.nn.Linear(2, 2), plan, precision=Precision(plan, torch.device("cpu")))
    assert str(fallback) == "attention: asked varlen, got auto: no layer of Linear takes the lengths of clips"


@pytest.mark.parametrize("padded", [280, 333])
def test_masks_are_spans_within_the_clips_for_any_padding(padded):
    lengths = (40, 44, 120, 280)
    batch = batch_of(*lengths, padded=padded)
    for mask in (masked(augment(batch, torch.Generator().manual_seed(0))), masked(batch)):
        assert mask.shape == (4, padded // 4)
        for row, length in zip(mask, lengths, strict=True):
            assert not row[length // 4 :].any()
            whole = row[: length // 4 // BLOCK * BLOCK].view(-1, BLOCK)
            assert (whole.sum(dim=1) == SPAN).all()
            assert (whole.int().diff(dim=1).abs().sum(dim=1) <= 2).all(), "one span, not scattered frames"


@pytest.mark.parametrize("padded", [160, 220, 441])
def test_a_clip_alone_gives_what_it_gives_padded_among_others(net, padded):
    batch = batch_of(160, 88, 48, padded=padded)
    logits, codes = net(batch.inputs, batch.lengths, masked(batch))
    values, shares = loss(net, batch, Recipe())
    for at, length in enumerate((160, 88, 48)):
        alone = Batch(batch.inputs[at : at + 1, :, :length], batch.targets[:1], batch.lengths[at : at + 1])
        mine, own_codes = net(alone.inputs, alone.lengths, masked(alone))
        torch.testing.assert_close(logits[at : at + 1, : length // 4], mine, atol=1e-5, rtol=1e-5)
        assert torch.equal(codes[at : at + 1, : length // 4], own_codes)
        assert loss(net, alone, Recipe())[1] == shares[at]
    noise = torch.arange(padded) >= batch.lengths[:, None]
    spoilt = dataclasses.replace(batch, inputs=torch.where(noise[:, None], 100.0, batch.inputs))
    assert loss(net, spoilt, Recipe())[0] == values


def test_the_score_counts_masked_frames_alone(net):
    batch = augment(batch_of(160, 80), torch.Generator().manual_seed(0))
    mask = masked(batch)
    logits, codes = net(batch.inputs, batch.lengths, mask)
    right = mask & (logits.argmax(-1) == codes)
    torch.testing.assert_close(loss(net, batch, Recipe())[1], right.sum(dim=1) / mask.sum(dim=1))


@pytest.mark.slow
@pytest.mark.skipif(not this_machine("cpu").supports("compile"), reason="nothing can be compiled here")
@pytest.mark.parametrize("bucket", [False, True])
def test_compiled_training_takes_batches_of_any_length(bucket):
    """Without buckets shapes are dynamic, and the backward pass once had the strides of the length that was traced."""
    workload, recipe = speech(clips=12, size=SIZES["tiny"]), Recipe(batch_size=2, steps=4, epochs=None)
    plain = trained(workload, recipe, Plan(bucket=bucket, log_every=1))
    compiled = trained(workload, recipe, Plan(bucket=bucket, log_every=1, compile="default"))
    assert compiled.effective.plan.compile == "default", "it went on uncompiled"
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-3)
