"""Decoding: any rate and channel count to one mono length, the same by both decoders, broken files to a BadItem."""

import numpy as np
import pytest
import soundfile
import torch

from speedkit.errors import BadItem
from speedkit.lab.decode import load_audio
from speedkit.machine import this_machine

RATE_HZ = 8000
REASON = this_machine("cpu").why_not("torchcodec")
torchcodec = pytest.mark.skipif(bool(REASON), reason=REASON)
everywhere = pytest.mark.parametrize("decoder", ["soundfile", pytest.param("torchcodec", marks=torchcodec)])


def tone(seconds=1.0, rate_hz=RATE_HZ, hz=440.0):
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate_hz)) / rate_hz)


def write(path, samples, rate_hz=RATE_HZ, **kinds):
    soundfile.write(path, samples, rate_hz, **kinds)
    return path


@pytest.mark.parametrize(("name", "tolerance"), [("a.wav", 1e-4), ("a.flac", 1e-4), ("a.ogg", 0.05)])
def test_every_format_gives_the_samples_written_mixed_down_padded_or_cut(tmp_path, name, tolerance):
    path = write(tmp_path / name, np.stack([tone(), -0.5 * tone()], axis=1))
    wave = load_audio(path, RATE_HZ, 2 * RATE_HZ)
    assert wave.dtype == torch.float32 and torch.equal(wave[RATE_HZ:], torch.zeros(RATE_HZ))
    assert np.abs(wave[:RATE_HZ].numpy() - 0.25 * tone()).max() < tolerance
    assert torch.equal(load_audio(path, RATE_HZ, 1000), wave[:1000])
    if name == "a.wav":  # 16 bits are scaled as libsndfile does it
        exact = soundfile.read(path, dtype="float32")[0].mean(axis=1)
        assert torch.equal(wave[:RATE_HZ], torch.from_numpy(exact))


@everywhere
@pytest.mark.parametrize("from_hz", [4000, 11025, 44100])
def test_another_rate_is_resampled_in_part_as_in_whole(tmp_path, decoder, from_hz):
    path = write(tmp_path / "r.wav", tone(2.0, from_hz), from_hz, subtype="FLOAT")
    wave = load_audio(path, RATE_HZ, 2 * RATE_HZ, decoder=decoder)
    assert np.abs(wave.numpy() - tone(2.0))[100:-100].max() < 0.01
    expected = load_audio(path, RATE_HZ, 3001)
    assert (wave[:3001] - expected)[100:-100].abs().max() < 1e-6


BROKEN = {
    "garbage": (b"RIFF\x00\x01 not audio at all" * 9, "cannot be decoded"),
    "empty": (b"", "cannot be decoded"),
    "silent header": (np.zeros(0), "no samples|cannot be decoded"),
    "nan": (np.where(np.arange(8000) == 77, np.nan, 0.1), "not finite"),
    "missing": (None, "No such file"),
}


@everywhere
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_a_bad_item_that_names_it(tmp_path, kind, decoder):
    path, (content, why) = tmp_path / "a.wav", BROKEN[kind]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        write(path, content, subtype="FLOAT")
    with pytest.raises(BadItem, match=why) as caught:
        load_audio(path, RATE_HZ, RATE_HZ, decoder=decoder)
    assert caught.value.path == str(path) and str(path) in str(caught.value)


def recording(seconds=1.0, channels=1):
    noise = np.random.default_rng(0).uniform(-0.05, 0.05, (int(seconds * RATE_HZ), channels))
    return noise + tone(seconds)[:, None] * np.linspace(1.0, -0.3, channels)


@torchcodec
@pytest.mark.parametrize(("seconds", "channels"), [(0.5, 2), (1.0, 1), (3.0, 2)])  # padded, as long as asked for, cut
@pytest.mark.parametrize(
    ("name", "subtype", "tolerance"),
    [
        ("a.wav", "PCM_16", 0.0),
        ("a.wav", "FLOAT", 0.0),
        ("a.flac", "PCM_16", 0.0),
        ("a.ogg", "VORBIS", 2e-6),
        ("a.mp3", "MPEG_LAYER_III", 1e-5),
    ],
)
def test_decoders_agree_to_the_bit_where_nothing_is_lossy(tmp_path, name, subtype, tolerance, seconds, channels):
    path = write(tmp_path / name, recording(seconds, channels), subtype=subtype)
    expected, found = load_audio(path, RATE_HZ, RATE_HZ), load_audio(path, RATE_HZ, RATE_HZ, decoder="torchcodec")
    assert found.shape == (RATE_HZ,) and found.dtype == torch.float32
    # FFmpeg 5 does not cut an OGG of less than a page where it ends: the rest of the last block follows.
    end = int(seconds * RATE_HZ) if name == "a.ogg" else RATE_HZ
    # The mean of two channels may be rounded another way.
    assert (found - expected)[:end].abs().max() <= max(tolerance, 1e-7 * (channels > 1))


@everywhere
def test_the_end_of_a_long_file_is_never_read(tmp_path, decoder):
    path = write(tmp_path / "long.wav", recording(60.0))
    expected = load_audio(path, RATE_HZ, 4000, decoder=decoder)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) - len(whole) // 2))
    assert torch.equal(load_audio(path, RATE_HZ, 4000, decoder=decoder), expected)
