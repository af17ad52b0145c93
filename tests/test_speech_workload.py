"""The speech workload: its utterances, masks that leave padding alone, a net that never sees it, and what it learns."""

import contextlib
import os
import statistics

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from speedkit.data.sources import find_items
from speedkit.errors import UsageError
from speedkit.hardware import this_machine
from speedkit.measure.loading import examine
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workloads.generated import TEST_PATTERN
from speedkit.workloads.speech import BANDS, BLOCK, SPAN, SpeechNet, augment, count, loss, masked, speech
from speedkit.workloads.utterances import RATE_HZ, clip, clip_path, generate

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HEARD = [0.0439, 0.0495, 0.0645, 0.0382, 0.0298, 0.0256]  # mean absolute samples of the first utterances of seed 0


@pytest.fixture(scope="module")
def spoken():
    return speech(clips=24, size="tiny")


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    made = SpeechNet("tiny")
    for block in made.blocks:  # at first the biases are zero, and padding that leaks would be, too
        torch.nn.init.normal_(block.conv_module.widen[0].bias)
    return made.eval()


def batch_of(*lengths, padded=None, seed=0):
    """A batch of clips of so many frames, each by its place in the batch; padded to the longest or to `padded`."""
    longest = padded or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    rows = [F.pad(torch.randn(BANDS, n, generator=generator), (0, longest - n)) for n in lengths]
    return torch.stack(rows), torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.long)


def drawn(batch, seed=0):
    return augment(batch, torch.Generator().manual_seed(seed))


# --- utterances


def test_an_utterance_is_a_function_of_seed_and_index():
    assert np.array_equal(clip(3, seed=1), clip(3, seed=1))
    assert not np.array_equal(clip(3, seed=1)[:8000], clip(3, seed=2)[:8000])
    assert not np.array_equal(clip(3)[:8000], clip(4)[:8000])


def test_the_utterances_are_those_that_published_figures_were_measured_on():
    heard = [round(float(np.abs(clip(index)).mean()), 4) for index in range(len(HEARD))]
    assert heard == pytest.approx(HEARD, abs=2e-4), "another sound: raise utterances._VERSION and publish anew"


def test_lengths_are_log_normal_and_voices_differ():
    clips = [clip(index) for index in range(60)]
    assert all(wave.dtype == np.float32 and 0.1 < np.abs(wave).max() < 0.9 for wave in clips)
    lengths_s = np.array([len(wave) / RATE_HZ for wave in clips])
    assert 0.5 <= lengths_s.min() < 1 < 4 < lengths_s.max() <= 12
    assert np.log(lengths_s).std() == pytest.approx(0.6, abs=0.15)


def test_files_on_disk_hold_the_utterances_and_a_larger_set_begins_with_the_smaller(tmp_path):
    small, large = generate(tmp_path, clips=8), generate(tmp_path, clips=10)
    assert small != large
    for index in range(8):
        wave, rate_hz = soundfile.read(clip_path(small, index), dtype="float32")
        assert rate_hz == RATE_HZ and np.abs(wave - clip(index)).max() < 1e-4
        assert np.array_equal(wave, soundfile.read(clip_path(large, index), dtype="float32")[0])
    found = find_items(large, test_pattern=TEST_PATTERN, labelled=False)
    assert len(found.train) == 8 and len(found.test) == 2
    assert {path.suffix for path in large.iterdir()} == {".wav", ".flac"}


# --- data


def own_data(root, durations_s=(0.6, 1.0, 0.3, 2.0, 0.8, 0.7), rates_hz=(8000,)):
    """Write recordings of noise into a flat folder, the rates taken in turn."""
    noise = np.random.default_rng(0)
    for number, duration_s in enumerate(durations_s):
        rate_hz = rates_hz[number % len(rates_hz)]
        soundfile.write(root / f"{number}.wav", noise.uniform(-0.5, 0.5, int(duration_s * rate_hz)), rate_hz)
    return root


def test_lengths_are_known_before_a_clip_is_decoded(tmp_path, spoken):
    mine = speech(own_data(tmp_path, rates_hz=(8000, 8000, 22050)), test_pattern=r"^[0-2]\.")
    for workload in (mine, spoken):
        for item in (*workload.train, *workload.test):
            features = workload.features(workload.load(item))
            assert features.shape == (BANDS, workload.length(item)) and features.shape[1] % 4 == 0
            assert features.isfinite().all() and features.mean(dim=1).abs().max() < 1e-4
    assert mine.length(mine.test[2]) == 4 * BLOCK  # 0.3 s, and silence up to 0.4
    assert {mine.length(item) for item in mine.train} == {200, 80, 68}


def test_a_flat_folder_of_recordings_needs_no_labels(tmp_path):
    mine = speech(own_data(tmp_path), size="tiny")
    assert len(mine.train) == 5 and len(mine.test) == 1 and {mine.target(item) for item in mine.train} == {0}
    with pytest.raises(UsageError, match="no class-named subfolders"):
        find_items(tmp_path)


def test_longer_clips_than_asked_are_left_out_and_named(tmp_path):
    own_data(tmp_path)
    (tmp_path / "broken.wav").write_bytes(b"no audio")
    with pytest.raises(Exception, match="1 of 7 files cannot be used"):
        speech(tmp_path)
    (tmp_path / "broken.wav").unlink()
    mine = speech(tmp_path, max_duration_s=0.9)
    assert len(mine.train) + len(mine.test) == 4
    assert dict(mine.quarantined) == {
        str(tmp_path / "1.wav"): "it lasts 1.0 s, over 0.9 (max_duration_s)",
        str(tmp_path / "3.wav"): "it lasts 2.0 s, over 0.9 (max_duration_s)",
    }
    history = fit(mine, Recipe(steps=1, epochs=None, batch_size=2), device="cpu", progress=False)
    assert history.quarantined == dict(mine.quarantined)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "huge"}, "size 'huge' is unknown.*tiny, small, medium"),
        ({"clips": 7}, "clips=7 is too few"),
        ({"test_pattern": "a"}, "needs audio files.*--data-dir"),
        ({"data_dir": ".", "clips": 100}, "leave it out"),
        ({"data_dir": "nowhere"}, "does not exist"),
        ({"clips": 8, "max_duration_s": 0.1}, "too few recordings last up to 0.1 s"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        speech(**options)


def test_the_doctor_examines_clips_of_other_rates(tmp_path):
    mine = speech(own_data(tmp_path, rates_hz=(8000, 8000, 22050)), size="tiny")
    assert {item.sample_rate_hz for item in mine.train} == {8000, 22050}
    found = examine(mine, Recipe(batch_size=5), device="cpu")
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)


# --- masks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [None, 300, 333])
def test_masks_are_spans_within_the_clips_for_any_padding(device, padded):
    lengths = (40, 44, 120, 280)
    batch = tuple(tensor.to(device) for tensor in batch_of(*lengths, padded=padded))
    *same, mask = augment(batch, torch.Generator(device).manual_seed(0))
    assert all(torch.equal(one, other) for one, other in zip(same, batch, strict=True))
    for made in (mask, masked(batch)):
        assert made.shape == (4, (padded or 280) // 4) and made.device.type == device
        for row, length in zip(made, lengths, strict=True):
            assert not row[length // 4 :].any()
            whole = row[: length // 4 // BLOCK * BLOCK].view(-1, BLOCK)
            assert (whole.sum(dim=1) == SPAN).all()
            assert (whole.int().diff(dim=1).abs().sum(dim=1) <= 2).all(), "one span, not scattered frames"
    assert int(count((*batch, mask))) == int(mask.sum()) and count((*batch, mask)).device.type == device


def test_masks_are_seeded_and_each_clip_and_block_draws_its_own():
    batch = batch_of(*[400] * 6)
    masks = [drawn(batch, seed)[3] for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    spans = {tuple(row.tolist()) for row in masks[0].view(-1, BLOCK)}
    assert len(spans) == BLOCK - SPAN + 1
    assert len({tuple(row.tolist()) for row in masks[0]}) == 6


def test_the_mask_of_an_evaluation_is_the_clips_own():
    alone, among = masked(batch_of(120)), masked(batch_of(200, 120, 40, padded=444))[1:2]
    assert torch.equal(alone, among[:, :30]) and not among[:, 30:].any() and alone.sum() == 12


# --- net


@pytest.mark.parametrize("padded", [160, 220, 441])
def test_a_clip_alone_gives_what_it_gives_padded_among_others(net, padded):
    batch = batch_of(160, 88, 48, padded=padded)
    logits, codes = net(*batch[:2], masked(batch))
    values, shares = loss(net, batch, Recipe())
    for at, length in enumerate((160, 88, 48)):
        alone = batch[0][at : at + 1, :, :length], batch[1][at : at + 1], batch[2][:1]
        mine, own_codes = net(*alone[:2], masked(alone))
        torch.testing.assert_close(logits[at : at + 1, : length // 4], mine, atol=1e-5, rtol=1e-5)
        assert torch.equal(codes[at : at + 1, : length // 4], own_codes)
        assert loss(net, alone, Recipe())[1] == shares[at]
    noise = torch.arange(padded) >= batch[1][:, None]
    spoilt = torch.where(noise[:, None], 100.0, batch[0]), *batch[1:]
    assert loss(net, spoilt, Recipe())[0] == values


def test_torchaudios_own_layer_would_let_padding_in():
    """What the own convolution module is for; it can go when this fails."""
    from torchaudio.models import Conformer

    theirs = Conformer(16, 2, 32, 1, 5, use_group_norm=True).eval()
    x = torch.randn(1, 12, 16)
    alone, _ = theirs(x, torch.tensor([12]))
    padded, _ = theirs(torch.cat((F.pad(x, (0, 0, 0, 8)), torch.randn(1, 20, 16))), torch.tensor([12, 20]))
    assert (padded[0, :12] - alone[0]).abs().max() > 1e-2


def test_what_is_masked_is_not_seen(net):
    batch = batch_of(120, 80)
    mask = masked(batch)
    hidden = mask.repeat_interleave(4, dim=1)[:, None]
    other = torch.where(hidden, torch.randn(batch[0].shape), batch[0])
    assert torch.equal(net(batch[0], batch[1], mask)[0], net(other, batch[1], mask)[0])
    assert not torch.equal(net(batch[0], batch[1], ~mask)[0], net(other, batch[1], ~mask)[0])


def test_codes_are_the_nearest_of_the_codebook_and_no_seeds(net):
    inputs = batch_of(120)[0]
    codes = net.codes(inputs)
    for at in (0, 7, 29):
        frame = inputs[0, :, 4 * at : 4 * at + 4].reshape(-1) @ net.projection
        distances = (F.normalize(frame, dim=0) - net.codebook.T).norm(dim=1)
        assert int(distances.argmin()) == int(codes[0, at])
    torch.manual_seed(5)
    assert torch.equal(SpeechNet("small").codes(inputs), codes)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.codes(inputs), codes)


def test_loss_and_score_count_masked_frames_alone(net):
    batch = drawn(batch_of(160, 80))
    value, shares = loss(net, batch, Recipe())
    logits, codes = net(batch[0], batch[1], batch[3])
    each = -logits.log_softmax(dim=-1).gather(2, codes[..., None])[..., 0]
    torch.testing.assert_close(value, each[batch[3]].mean())
    right = logits.argmax(-1) == codes
    expected = torch.stack([row[mask].float().mean() for row, mask in zip(right, batch[3], strict=True)])
    torch.testing.assert_close(shares, expected)


@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_accumulated_gradients_are_those_of_the_whole_batch(spoken, micro_batch):
    """Clips of different lengths: each part weighs as many masked frames as it holds."""

    def gradients(**plan):
        recipe = Recipe(batch_size=8, steps=1, epochs=None)
        with contextlib.closing(setup_run(spoken, recipe, Plan(**plan), device="cpu", progress=False)) as run:
            next(steps(run))
            return [weight.grad for weight in run.model.parameters()], float(run.last_loss)

    (whole, whole_loss), (parts, parts_loss) = gradients(), gradients(micro_batch=micro_batch)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    for mine, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_step_never_asks_the_device_for_a_number(device):
    net, batch = SpeechNet("tiny").to(device), tuple(tensor.to(device) for tensor in batch_of(160, 80))
    generator = torch.Generator(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        batch = augment(batch, generator)
        (loss(net, batch, Recipe())[0] * (count(batch) / 50)).backward()
    assert not {event.name for event in profile.events()} & {"aten::_local_scalar_dense", "aten::nonzero"}


def chance(workload) -> float:
    """Return the score of a guess that never looks: always the code that is commonest in the training set."""
    net = SpeechNet("tiny")  # any has the same codes

    def guessed(item) -> torch.Tensor:
        inputs = workload.features(workload.load(item))[None]
        return net.codes(inputs)[masked((inputs, torch.tensor(inputs.shape[-1:])))]

    commonest = torch.cat([guessed(item) for item in workload.train]).mode().values
    return statistics.fmean((guessed(item) == commonest).float().mean().item() for item in workload.test)


def test_the_net_learns_more_than_the_commonest_code(tmp_path):
    workload = speech(clips=80, size="tiny")
    recipe = Recipe(batch_size=12, steps=60, epochs=None, learning_rate=4e-3)
    found = fit(workload, recipe, Plan(cache="ram", bucket=True), device="cpu", progress=False).evaluation
    assert found["metric"] == "masked-frame accuracy" and found["n"] == 20
    assert found["value"] > chance(workload) + 0.04


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_net_compiles_whole_once_for_each_padded_length(spoken, precision):
    hardware = this_machine("cpu")
    if not hardware.supports("compile"):
        assert not os.environ.get("CI"), hardware.why_not("compile")
        pytest.skip(hardware.why_not("compile"))
    torch.manual_seed(0)
    net, counter = SpeechNet("tiny"), CompileCounterWithBackend("inductor")
    compiled = torch.compile(net, backend=counter, dynamic=False, fullgraph=True)
    found = []
    for lengths in ((160, 80), (160, 44), (80, 80)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            batch = drawn(batch_of(*lengths))
            value, _ = loss(compiled, batch, Recipe())
            expected, _ = loss(net, batch, Recipe())
        value.backward()
        found.append((float(value), float(expected)))
    assert counter.frame_count == 2  # one graph for each of the two padded lengths
    assert all(weight.grad.isfinite().all() for weight in net.parameters())
    for mine, theirs in found:
        assert mine == pytest.approx(theirs, abs=0.05 if precision == "bf16" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [False, True])
def test_compiled_training_takes_batches_of_any_length(bucket):
    """Without buckets shapes are dynamic, and the backward pass once had the strides of the length that was traced."""
    if not this_machine("cpu").supports("compile"):
        pytest.skip(this_machine("cpu").why_not("compile"))
    workload, recipe = speech(clips=12, size="tiny"), Recipe(batch_size=2, steps=4, epochs=None)
    plain, compiled = (
        fit(workload, recipe, Plan(bucket=bucket, compile=mode, log_every=1), device="cpu", progress=False)
        for mode in ("off", "default")
    )
    assert compiled.effective.plan.compile == "default", "it went on uncompiled"
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-3)
