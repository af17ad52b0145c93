"""Recordings of an invented language: vowels, consonant-like noises and pauses, each clip by a speaker of its own.

A clip is a function of its index alone. Lengths are log-normal, as those of utterances are. The language is one for
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
MEDIAN_S, SPREAD, SHORTEST_S, LONGEST_S = 2.2, 0.6, 0.5, 12.0
CHUNK = RATE_HZ // 200  # 5 ms, in which the mouth stands still
# F1 to F3 of eight vowels as men speak them (after Peterson and Barney 1952), and a fourth that all share [Hz].
FORMANTS_HZ = (
    (270, 390, 530, 660, 730, 570, 440, 300),
    (2290, 1990, 1840, 1720, 1090, 840, 1020, 870),
    (3010, 2550, 2480, 2410, 2440, 2410, 2240, 2240),
    (3600,) * 8,
)
WIDTHS_HZ = np.array([60.0, 90.0, 130.0, 200.0])
# Noises: where their energy lies and how wide [Hz], how loud; the last three are bursts after a silence, as in p, t, k.
NOISES_HZ = (5500, 3000, 1400, 4200, 4000, 1800, 700)
NOISE_WIDTHS_HZ = (1200, 900, 700, 2500, 1500, 500, 400)
NOISE_LEVELS = (1.0, 1.0, 0.5, 0.4, 2.0, 2.0, 2.0)
BURSTS_FROM, PAUSE = 4, 7
LANGUAGE = np.random.default_rng(1)
VOWEL_AFTER = LANGUAGE.dirichlet(np.full(8, 0.4), PAUSE + 1)  # each row sums to 1: after noise, or pause
NOISE_AFTER = np.hstack([0.85 * LANGUAGE.dirichlet(np.full(PAUSE, 0.4), 8), np.full((8, 1), 0.15)])  # or a pause


def movements(rng: Generator, chunks: int) -> NDArray:
    """Return what a mouth does, [chunks, 8]: four formants, a noise's place and width [Hz], its level, the voice's."""
    rows: list[NDArray] = []
    noise = PAUSE
    while len(rows) < chunks:
        vowel = rng.choice(8, p=VOWEL_AFTER[noise])
        place_hz, width_hz, level = 1500.0, 500.0, 0.0
        if noise != PAUSE:
            place_hz, width_hz, level = NOISES_HZ[noise], NOISE_WIDTHS_HZ[noise], NOISE_LEVELS[noise]
        sounds = [(0.06, 0.16, level, 0.0), (0.07, 0.22, 0.0, rng.uniform(0.6, 1.0))]  # seconds, noise, voice
        if noise == PAUSE:
            sounds[0] = (0.1, 0.4, 0.0, 0.0)
        elif noise >= BURSTS_FROM:
            sounds[:1] = [(0.04, 0.08, 0.0, 0.0), (0.01, 0.03, level, 0.0)]
        for shortest_s, longest_s, loud, voice in sounds:
            row = np.array([*(formant[vowel] for formant in FORMANTS_HZ), place_hz, width_hz, loud, voice])
            rows += [row] * int(rng.uniform(shortest_s, longest_s) * RATE_HZ / CHUNK)
        noise = rng.choice(PAUSE + 1, p=NOISE_AFTER[vowel])
    made = np.array(rows[:chunks])
    for column, width in ((0, 11), (1, 11), (2, 11), (6, 3), (7, 3)):  # tongue and lips take 55 ms, breath and voice 15
        track = np.pad(made[:, column], width // 2, mode="edge")
        made[:, column] = np.convolve(track, np.full(width, 1 / width), "valid")
    return made


def resonators(hz: NDArray, width_hz: NDArray, peaked: bool) -> NDArray:
    """Return second-order sections [..., 6] (Klatt 1980), of gain 1 at their peak, or else at 0 Hz."""
    radius = np.exp(-np.pi * width_hz / RATE_HZ)
    b, c = 2 * radius * np.cos(2 * np.pi * hz / RATE_HZ), -(radius**2)
    gain = (1 + c) / 2 if peaked else 1 - b - c
    return np.stack(np.broadcast_arrays(gain, 0.0, -gain if peaked else 0.0, 1.0, -b, -c), axis=-1)


def filtered(signal: NDArray, sections: NDArray) -> NDArray:
    """Return the signal [T] through sections [chunks, S, 6] that change from chunk to chunk."""
    state: Any = np.zeros((sections.shape[1], 2))
    parts = []
    for part, now in zip(signal.reshape(len(sections), -1), sections, strict=True):
        part, state = sosfilt(now, part, zi=state)
        parts.append(part)
    return np.concatenate(parts)


def clip(index: int) -> NDArray[np.float32]:
    """Return clip `index` of the set at 16 kHz: [T] float32 within -1..1."""
    rng = np.random.default_rng([0, index])
    n = int(RATE_HZ * np.clip(MEDIAN_S * np.exp(SPREAD * rng.standard_normal()), SHORTEST_S, LONGEST_S))
    mouth = movements(rng, -(-n // CHUNK))
    time_s = np.arange(len(mouth) * CHUNK) / RATE_HZ
    # The speaker: a shorter throat has higher formants and, as a rule, a higher voice.
    throat = rng.uniform(0.95, 1.25)
    bends = rng.uniform(0.85, 1.15, int(4 * time_s[-1]) + 2)  # the voice rises and falls, and sinks towards the end
    contour = np.interp(4 * time_s, np.arange(len(bends)), bends) * (1.1 - 0.02 * time_s)
    turns = np.cumsum(115 * throat**3 * rng.uniform(0.85, 1.2) * contour / RATE_HZ)
    pulses = np.diff(np.floor(turns), prepend=0.0)
    voice = lfilter([1.0], [1.0, -0.95], pulses + 0.01 * rng.standard_normal(len(pulses)))
    breath = rng.standard_normal(len(pulses))
    formants, hisses = mouth[:, :4] * throat, mouth[:, 4:5] * throat
    voiced = filtered(voice * np.repeat(mouth[:, 7], CHUNK), resonators(formants, WIDTHS_HZ, peaked=False))
    hissed = filtered(breath * np.repeat(mouth[:, 6], CHUNK), resonators(hisses, mouth[:, 5:6], peaked=True))
    mixed = voiced / (voiced.std() + 1e-9) + hissed
    mixed += 10 ** (-rng.uniform(15, 35) / 20) * rng.standard_normal(len(mixed)) * mixed.std()
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max()))[:n].astype(np.float32)


def file_name(index: int) -> str:
    """Return what clip `index` is called; its format and its side of the split follow from the index."""
    return f"{index:05d}_{'test' if index % 4 == 3 else 'train'}.{FORMATS[index // 4 % 2]}"


def generate(clips: int = CLIPS) -> Path:
    """Return a flat folder with `clips` recordings (WAV, FLAC), as `complete` makes it."""

    def write(index: int, path: Path, format: str) -> None:
        soundfile.write(path, clip(index), RATE_HZ, format=format)

    return complete(f"utterances/{clips}_clips_seed0_v{VERSION}", [*map(file_name, range(clips))], write)
