"""The audio workload: clips brought to one rate and length, deterministic features, and a loss of two parts."""

import itertools

import pytest
import soundfile
import torch
import torch.nn.functional as F

from speedkit.recipe import Recipe
from speedkit.workloads.audio import AudioNet, audio, augment, log_mel, loss

SPECTROGRAM = {"sample_rate_hz": 16000, "n_fft": 512, "hop": 160, "bands": 64}


def own_data(root, durations_s, rates_hz=(8000,)):
    """Write two classes of noise, one file of each per duration, the rates taken in turn."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number, (duration_s, rate_hz) in enumerate(zip(durations_s, itertools.cycle(rates_hz))):
            soundfile.write(root / name / f"{number}.wav", waveform_of(int(duration_s * rate_hz)).numpy(), rate_hz)
    return root


def waveform_of(*shape):
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_own_data_takes_the_commonest_rate_and_resamples_the_rest(tmp_path):
    mine = audio(own_data(tmp_path, [0.3] * 4, rates_hz=(8000, 8000, 22050, 8000)), test_pattern=r"^3\.")
    assert mine.parameters["sample_rate_hz"] == 8000 and mine.classes == ("a", "b") and mine.margin == 0.02
    assert {item.sample_rate_hz for item in mine.train} == {8000, 22050}
    assert {tuple(mine.load(item).shape) for item in mine.train} == {(2400,)}


def test_clip_length_is_a_whole_number_of_hops_that_leaves_out_the_longest_of_a_hundred(tmp_path):
    folder = own_data(tmp_path, [0.5] * 110 + [0.501] + [9.0])
    assert audio(folder, test_pattern=r"^[0-4]\.").parameters["num_samples"] == 51 * 80
    assert audio(folder, test_pattern=r"^[0-4]\.", max_duration_s=0.2).parameters["num_samples"] == 20 * 80


def test_features_are_the_same_bits_with_any_number_of_threads():
    alone = log_mel(waveform_of(160000), **SPECTROGRAM)
    torch.set_num_threads(3)
    try:
        assert torch.equal(log_mel(waveform_of(160000), **SPECTROGRAM), alone)
    finally:
        torch.set_num_threads(1)


def test_features_are_standardised_and_silence_is_finite():
    features = log_mel(waveform_of(16000), **SPECTROGRAM)
    assert features.dtype == torch.float32 and features.shape == (1, 64, 100)
    assert abs(features.mean()) < 1e-5 and abs(features.std() - 1) < 1e-3
    torch.testing.assert_close(log_mel(0.01 * waveform_of(16000), **SPECTROGRAM), features, atol=1e-3, rtol=0)
    assert torch.equal(log_mel(torch.zeros(16000), **SPECTROGRAM), torch.zeros(1, 64, 100))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_features_of_a_batch_are_those_of_its_waveforms(device):
    waveforms = waveform_of(6, 16000) * torch.logspace(-3, 1, 6)[:, None]  # each is brought to scale by itself
    waveforms[2] = 0
    batch = log_mel(waveforms.to(device), **SPECTROGRAM)
    single = torch.stack([log_mel(waveform, **SPECTROGRAM) for waveform in waveforms])
    torch.testing.assert_close(batch.cpu(), single, atol=2e-4, rtol=0)


def test_augment_turns_in_time_and_masks_at_most_a_sixth_of_each_axis():
    inputs = torch.randn(64, 1, 64, 60)
    changed, _ = augment((inputs, torch.zeros(64)), torch.Generator().manual_seed(0))
    hidden = changed[:, 0] == 0  # [B, M, F]
    frames, bands = hidden.all(dim=1).sum(dim=1), hidden.all(dim=2).sum(dim=1)
    assert 1 <= frames.max() <= 11 and 1 <= bands.max() <= 12
    assert len({int(count) for count in frames}) > 3, "each sample draws its own"
    for before, after, mask in zip(inputs[:8, 0], changed[:8, 0], hidden[:8], strict=True):
        turned = (torch.where(mask, 0, before.roll(shift, dims=1)) for shift in range(60))
        assert any(torch.equal(one, after) for one in turned)


def test_loss_is_cross_entropy_with_label_smoothing_and_of_both_targets_of_a_mixture():
    inputs, targets, net = torch.randn(6, 1, 64, 50), torch.arange(6) % 3, AudioNet(3, "tiny")
    smooth, logits = loss(net, (inputs, targets), Recipe(label_smoothing=0.3))
    expected = 0.7 * F.cross_entropy(logits, targets) - 0.3 * logits.log_softmax(dim=1).mean()
    torch.testing.assert_close(smooth, expected)
    others, weight = targets.flip(0), torch.linspace(0.5, 1, 6)
    mixed, _ = loss(net, (inputs, targets, others, weight), Recipe())
    soft = weight[:, None] * F.one_hot(targets, 3) + (1 - weight[:, None]) * F.one_hot(others, 3)
    torch.testing.assert_close(mixed, F.cross_entropy(logits, soft))
