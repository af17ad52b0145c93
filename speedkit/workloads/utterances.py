"""Recordings of an invented language: vowels, consonant-like noises and pauses, each clip by a speaker of its own.

A clip is a function of (seed, index) alone. Lengths are log-normal, as those of utterances are. The language is one for
all clips: which sound follows which was drawn once, so that there is more to learn than single sounds.
"""

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import lfilter, sosfilt

from speedkit.workloads.generated import complete

RATE_HZ = 16000
CLIPS = 640  # 480 to train on, 160 to test on
VERSION = 1  # part of the folder's name: raise it when the sound of a clip changes
FORMATS = ("wav", "flac")  # in turn, with 16 bits
_MEDIAN_S, _SPREAD, _SHORTEST_S, _LONGEST_S = 2.2, 0.6, 0.5, 12.0
_CHUNK = RATE_HZ // 200  # 5 ms, in which the mouth stands still
# F1 to F3 of eight vowels as men speak them (after Peterson and Barney 1952), and a fourth that all share [Hz].
_VOWELS = np.array(
    [
        (270, 2290, 3010, 3600),
        (390, 1990, 2550, 3600),
        (530, 1840, 2480, 3600),
        (660, 1720, 2410, 3600),
        (730, 1090, 2440, 3600),
        (570, 840, 2410, 3600),
        (440, 1020, 2240, 3600),
        (300, 870, 2240, 3600),
    ],
    dtype=float,
)
_WIDTHS_HZ = np.array([60.0, 90.0, 130.0, 200.0])
# Noises: where their energy lies and how wide [Hz], how loud; the last three are bursts after a silence, as in p, t, k.
_NOISES = np.array(
    [
        (5500, 1200, 1.0),
        (3000, 900, 1.0),
        (1400, 700, 0.5),
        (4200, 2500, 0.4),
        (4000, 1500, 2.0),
        (1800, 500, 2.0),
        (700, 400, 2.0),
    ]
)
_BURSTS_FROM, _PAUSE = 4, len(_NOISES)
_LANGUAGE = np.random.default_rng(1)
_VOWEL_AFTER = _LANGUAGE.dirichlet(np.full(len(_VOWELS), 0.4), _PAUSE + 1)  # each row sums to 1: after noise, or pause
_NOISE_AFTER = np.pad(
    0.85 * _LANGUAGE.dirichlet(np.full(_PAUSE, 0.4), len(_VOWELS)), ((0, 0), (0, 1)), constant_values=0.15
)  # after a vowel; the last column is a pause


def _movements(rng: Generator, chunks: int) -> NDArray:
    """Return what a mouth does, [chunks, 8]: four formants, a noise's place and width [Hz], its level, the voice's."""
    rows: list[NDArray] = []
    noise = _PAUSE
    while len(rows) < chunks:
        vowel = rng.choice(len(_VOWELS), p=_VOWEL_AFTER[noise])
        place_hz, width_hz, level = _NOISES[noise] if noise != _PAUSE else (1500, 500, 0.0)
        sounds = [(0.06, 0.16, level, 0.0), (0.07, 0.22, 0.0, rng.uniform(0.6, 1.0))]  # seconds, noise, voice
        if noise == _PAUSE:
            sounds[0] = (0.1, 0.4, 0.0, 0.0)
        elif noise >= _BURSTS_FROM:
            sounds[:1] = [(0.04, 0.08, 0.0, 0.0), (0.01, 0.03, level, 0.0)]
        for shortest_s, longest_s, loud, voice in sounds:
            row = np.array([*_VOWELS[vowel], place_hz, width_hz, loud, voice])
            rows += [row] * int(rng.uniform(shortest_s, longest_s) * RATE_HZ / _CHUNK)
        noise = rng.choice(_PAUSE + 1, p=_NOISE_AFTER[vowel])
    made = np.array(rows[:chunks])
    for column, width in ((0, 11), (1, 11), (2, 11), (6, 3), (7, 3)):  # tongue and lips take 55 ms, breath and voice 15
        track = np.pad(made[:, column], width // 2, mode="edge")
        made[:, column] = np.convolve(track, np.full(width, 1 / width), "valid")
    return made


def _sections(hz: NDArray, width_hz: NDArray, peaked: bool) -> NDArray:
    """Return resonators as second-order sections [..., 6] (Klatt 1980), of gain 1 at their peak, or else at 0 Hz."""
    radius = np.exp(-np.pi * width_hz / RATE_HZ)
    b, c = 2 * radius * np.cos(2 * np.pi * hz / RATE_HZ), -(radius**2)
    gain = (1 + c) / 2 if peaked else 1 - b - c
    return np.stack(np.broadcast_arrays(gain, 0.0, -gain if peaked else 0.0, 1.0, -b, -c), axis=-1)


def _filtered(signal: NDArray, sections: NDArray) -> NDArray:
    """Return the signal [T] through sections [chunks, S, 6] that change from chunk to chunk."""
    state: Any = np.zeros((sections.shape[1], 2))
    parts = []
    for part, now in zip(signal.reshape(len(sections), -1), sections, strict=True):
        part, state = sosfilt(now, part, zi=state)
        parts.append(part)
    return np.concatenate(parts)


def clip(index: int, seed: int = 0) -> NDArray[np.float32]:
    """Return clip `index` of the set at 16 kHz: [T] float32 within -1..1."""
    rng = np.random.default_rng([seed, index])
    n = int(RATE_HZ * np.clip(_MEDIAN_S * np.exp(_SPREAD * rng.standard_normal()), _SHORTEST_S, _LONGEST_S))
    made = _movements(rng, -(-n // _CHUNK))
    time_s = np.arange(len(made) * _CHUNK) / RATE_HZ
    # The speaker: a shorter throat has higher formants and, as a rule, a higher voice.
    throat = rng.uniform(0.95, 1.25)
    bends = rng.uniform(0.85, 1.15, int(4 * time_s[-1]) + 2)  # the voice rises and falls, and sinks towards the end
    contour = np.interp(4 * time_s, np.arange(len(bends)), bends) * (1.1 - 0.02 * time_s)
    turns = np.cumsum(115 * throat**3 * rng.uniform(0.85, 1.2) * contour / RATE_HZ)
    pulses = np.diff(np.floor(turns), prepend=0.0)
    voice = lfilter([1.0], [1.0, -0.95], pulses + 0.01 * rng.standard_normal(len(pulses)))
    voiced = _filtered(voice * np.repeat(made[:, 7], _CHUNK), _sections(made[:, :4] * throat, _WIDTHS_HZ, peaked=False))
    hissed = _filtered(
        rng.standard_normal(len(pulses)) * np.repeat(made[:, 6], _CHUNK),
        _sections(made[:, 4:5] * throat, made[:, 5:6], peaked=True),
    )
    mixed = voiced / (voiced.std() + 1e-9) + hissed
    mixed += 10 ** (-rng.uniform(15, 35) / 20) * rng.standard_normal(len(mixed)) * mixed.std()
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max()))[:n].astype(np.float32)


def file_name(index: int) -> str:
    """Return what clip `index` is called; its format and its side of the split follow from the index."""
    return f"{index:05d}_{'test' if index % 4 == 3 else 'train'}.{FORMATS[index // 4 % 2]}"


def generate(folder: str | Path | None = None, clips: int = CLIPS, seed: int = 0) -> Path:
    """Return a flat folder with `clips` recordings (WAV, FLAC), as `complete` makes it."""
    paths = [file_name(index) for index in range(clips)]

    def write(index: int, path: Path) -> None:
        soundfile.write(path, clip(index, seed), RATE_HZ, format=paths[index].rpartition(".")[2])

    return complete(f"utterances/{clips}_clips_seed{seed}_v{VERSION}", paths, write, folder)
