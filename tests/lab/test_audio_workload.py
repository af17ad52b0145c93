"""The audio workload: clips brought to one rate and length, deterministic features, and a loss of two parts."""

import itertools
from dataclasses import replace

import pytest
import soundfile
import torch
from test_losses import WORKLOADS
from tiny import DEVICES, trained

from speedkit import load_workload
from speedkit.lab.workloads.audio import audio, log_mel

SPECTROGRAM = {"sample_rate_hz": 16000, "n_fft": 512, "hop": 160, "bands": 64}


def own_data(root, durations_s, rates_hz=(8000,)):
    """Write two classes of noise, one file of each per duration, the rates taken in turn."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number, (duration_s, rate_hz) in enumerate(zip(durations_s, itertools.cycle(rates_hz))):
            soundfile.write(root / name / f"{number}.wav", noise(int(duration_s * rate_hz)).numpy(), rate_hz)
    return root


def noise(*shape):
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_own_data_takes_the_commonest_rate_and_the_length_that_one_of_a_hundred_exceeds(tmp_path):
    mixed = audio(own_data(tmp_path / "mixed", [0.3] * 4, rates_hz=(8000, 8000, 22050, 8000)), test_pattern=r"^3\.")
    assert mixed.parameters["sample_rate_hz"] == 8000 and mixed.classes == ("a", "b") and mixed.margin == 0.02
    assert {tuple(mixed.load(item).shape) for item in mixed.train} == {(2400,)}
    folder = own_data(tmp_path / "long", [0.5] * 110 + [0.501] + [9.0])
    assert audio(folder, test_pattern=r"^[0-4]\.").parameters["num_samples"] == 51 * 80  # whole hops
    assert audio(folder, test_pattern=r"^[0-4]\.", max_duration_s=0.2).parameters["num_samples"] == 20 * 80


def test_features_are_standardised_and_the_same_bits_with_any_number_of_threads():
    features = log_mel(noise(160000), **SPECTROGRAM)
    assert features.dtype == torch.float32 and features.shape == (1, 64, 1000)
    assert abs(features.mean()) < 1e-5 and abs(features.std() - 1) < 1e-3
    torch.set_num_threads(3)
    try:
        assert torch.equal(log_mel(noise(160000), **SPECTROGRAM), features)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("device", DEVICES)
def test_features_of_a_batch_are_those_of_its_waveforms(device):
    waveforms = noise(6, 16000) * torch.logspace(-3, 1, 6)[:, None]  # each is brought to scale by itself
    waveforms[2] = 0  # silence
    batch = log_mel(waveforms.to(device), **SPECTROGRAM).cpu()
    each = torch.stack([log_mel(one, **SPECTROGRAM) for one in waveforms])
    torch.testing.assert_close(batch, each, atol=2e-4, rtol=0)
    assert not batch[2].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_net_has_the_width_and_depth_that_are_asked_for(name):
    work = load_workload(name, **WORKLOADS[name], width=96, depth=3)
    model, stages = work.model(), 3 if name in ("audio", "image") else 1
    blocks = [module for module in model.modules() if type(module).__name__ in ("Block", "ResidualBlock")]
    assert len(blocks) == 3 * stages and 96 in next(model.blocks.parameters()).shape
    assert trained(work, replace(work.recipe, batch_size=4, epochs=None, steps=1)).steps == 1
