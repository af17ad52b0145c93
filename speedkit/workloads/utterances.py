"""Recordings of an invented language: vowels after bursts of noise, each clip by a speaker of its own.

A clip is a function of its index alone. Lengths are log-normal, as those of utterances are. Which vowel follows which
burst is the same in all clips, so that there is more to learn than single sounds.
"""

from pathlib import Path

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import lfilter

from speedkit.workloads.generated import complete

RATE_HZ = 16000
CLIPS = 640  # 480 to train on, 160 to test on
VERSION = 2  # part of the folder's name: raise it when the sound of a clip changes
FORMATS = ("wav", "flac")  # in turn, with 16 bits
MEDIAN_S, SPREAD, SHORTEST_S, LONGEST_S = 2.2, 0.6, 0.5, 12.0
# F1 to F3 of eight vowels as men speak them (after Peterson and Barney 1952) [8, 3].
VOWELS_HZ = np.array(
    [
        (270, 390, 530, 660, 730, 570, 440, 300),
        (2290, 1990, 1840, 1720, 1090, 840, 1020, 870),
        (3010, 2550, 2480, 2410, 2440, 2410, 2240, 2240),
    ]
).T
BURSTS_HZ = (5500, 3000, 1400, 4200, 2000, 700)  # where the energy of a noise lies


def resonate(signal: NDArray, hz: float, width_hz: float) -> NDArray:
    """Return the signal [T] through a resonance of gain 1 at 0 Hz (Klatt 1980)."""
    radius = np.exp(-np.pi * width_hz / RATE_HZ)
    a = [1.0, -2 * radius * np.cos(2 * np.pi * hz / RATE_HZ), radius**2]
    return lfilter([sum(a)], a, signal)


def syllable(rng: Generator, throat: float, pitch_hz: float) -> NDArray:
    """Return a pause, a burst and a vowel [T] by a speaker of this throat and voice."""
    burst = rng.integers(len(BURSTS_HZ))
    vowel = burst if rng.random() < 0.7 else rng.integers(len(VOWELS_HZ))
    pause, short, long = (int(RATE_HZ * rng.uniform(*ends)) for ends in ((0.0, 0.1), (0.03, 0.15), (0.1, 0.3)))
    noise = resonate(rng.standard_normal(short), throat * BURSTS_HZ[burst], 800)
    turns = np.cumsum(np.linspace(1.1, 0.9, long)) * pitch_hz * rng.uniform(0.9, 1.1) / RATE_HZ
    voice = np.diff(np.floor(turns), prepend=0.0)  # a pulse each time the vocal folds close
    for hz, width_hz in zip(VOWELS_HZ[vowel], (60, 90, 130), strict=True):
        voice = resonate(voice, throat * hz, width_hz)
    parts = [0.3 * noise / noise.std() * np.hanning(short), voice / voice.std() * np.hanning(long) ** 0.3]
    return np.concatenate([np.zeros(pause), *parts])


def clip(index: int) -> NDArray[np.float32]:
    """Return clip `index` of the set at 16 kHz: [T] float32 within -1..1."""
    rng = np.random.default_rng([0, index])
    length = int(RATE_HZ * np.clip(MEDIAN_S * np.exp(SPREAD * rng.standard_normal()), SHORTEST_S, LONGEST_S))
    throat = rng.uniform(0.95, 1.25)  # a shorter throat has higher formants and, as a rule, a higher voice
    pitch_hz, speech = 115 * throat**3 * rng.uniform(0.85, 1.2), np.zeros(0)
    while len(speech) < length:
        speech = np.append(speech, syllable(rng, throat, pitch_hz))
    mixed = speech[:length] + 10 ** (-rng.uniform(15, 35) / 20) * rng.standard_normal(length)
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max())).astype(np.float32)


def file_name(index: int) -> str:
    """Return what clip `index` is called; its format and its side of the split follow from the index."""
    return f"{index:05d}_{'test' if index % 4 == 3 else 'train'}.{FORMATS[index // 4 % 2]}"


def generate(clips: int = CLIPS) -> Path:
    """Return a flat folder with `clips` recordings (WAV, FLAC), as `complete` makes it."""

    def write(index: int, path: Path, format: str) -> None:
        soundfile.write(path, clip(index), RATE_HZ, format=format)

    return complete(f"utterances/{clips}_clips_seed0_v{VERSION}", [*map(file_name, range(clips))], write)
