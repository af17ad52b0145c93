"""Recordings of a night outdoors: ten classes, synthesised and mixed into noisy clips, in class-named subfolders.

A clip is a function of (seed, index) alone: clips can be made in any order, and a larger set begins with the smaller.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import lfilter, oaconvolve

from speedkit.errors import UsageError
from speedkit.files import atomic
from speedkit.hardware import cache_root
from speedkit.system import usable_cores

Signal = NDArray[np.float32]  # [n], one channel
NOISE_DB = (-7.0, 12.0)  # the sound of the class over the background noise
DISTRACTOR_DB = (-14.0, -2.0)  # the sound of another class, relative to that of the class
DISTRACTORS = 2  # at most so many in a clip
TEST_PATTERN = r"_test\."  # every third clip of a class carries this in its file name
_VERSION = 1  # part of the folder's name: raise it when the sound of a clip changes
_FORMATS = ("wav", "flac", "wav", "ogg")  # of the takes in turn; WAV and FLAC with 16 bits


def _unit(signal: NDArray) -> Signal:
    """Return the signal at unit power."""
    return (signal / (np.sqrt(np.mean(np.square(signal))) + 1e-9)).astype(np.float32)


def _noise(rng: Generator, n: int, rate: int, low_hz: float, high_hz: float, slope: float = 0.0) -> Signal:
    """Return noise [n] between two frequencies, its amplitude falling as frequency ** -slope, of unit power."""
    spectrum = np.fft.rfft(rng.standard_normal(n, dtype=np.float32))
    hz = np.fft.rfftfreq(n, 1 / rate)
    edge = 1 / (1 + (low_hz / np.maximum(hz, 1.0)) ** 8) / (1 + (hz / high_hz) ** 8)
    return _unit(np.fft.irfft(spectrum * np.sqrt(edge) * np.maximum(hz, 20.0) ** -slope, n))


def _slow(rng: Generator, n: int, rate: int, rate_hz: float) -> Signal:
    """Return a random curve [n] between 0 and 1 that changes about `rate_hz` times a second."""
    points = rng.random(max(3, int(n / rate * rate_hz) + 2))
    return np.interp(np.linspace(0, len(points) - 1, n), np.arange(len(points)), points).astype(np.float32)


def _tone(hz: NDArray, rate: int, harmonics: NDArray) -> NDArray:
    """Return a harmonic tone whose fundamental follows `hz` [n], the harmonics at the given amplitudes."""
    phase = 2 * np.pi * np.cumsum(hz) / rate
    return sum(amplitude * np.sin((k + 1) * phase) for k, amplitude in enumerate(harmonics))


def _pulses(rng: Generator, rate: int, pulse_hz: NDArray, carrier_hz: float, decay_s: float) -> NDArray:
    """Return a carrier struck `pulse_hz` [n] times a second, each pulse dying away within about `decay_s`."""
    since_s = (np.cumsum(pulse_hz) / rate % 1) / pulse_hz
    carrier = np.sin(2 * np.pi * carrier_hz * np.arange(len(pulse_hz)) / rate + rng.uniform(0, 6.28))
    return carrier * np.exp(-since_s / decay_s) * (1 - np.exp(-since_s / (decay_s / 6)))


def _calls(animal: Callable[[Generator, int], Iterator[Any]]) -> Callable[[Generator, int, int], Signal]:
    """Make a sound [n] of calls: `animal` yields the range of the gaps between them in seconds, then each call."""

    @functools.wraps(animal)
    def sound(rng: Generator, n: int, rate: int) -> Signal:
        """Return calls [n] at random gaps, each at a loudness of its own."""
        calls = animal(rng, rate)
        shortest_s, longest_s = next(calls)
        signal, at = np.zeros(n, np.float32), int(rng.uniform(0, 0.25) * n)
        while at < n:
            one = next(calls)[: n - at]
            signal[at : at + len(one)] += one * rng.uniform(0.6, 1.0)
            at += len(one) + int(rng.uniform(shortest_s, longest_s) * rate)
        return signal

    return sound


def bat(rng: Generator, n: int, rate: int) -> Signal:
    """Sweeps as a bat detector makes them audible: short, falling fast, closer and closer together."""
    top_hz, bottom_hz = rng.uniform(0.3, 0.47) * rate, rng.uniform(0.1, 0.22) * rate
    length_s, gap_s, nearer = rng.uniform(0.006, 0.035), rng.uniform(0.08, 0.35), rng.uniform(0.85, 1.0)
    m = max(16, int(length_s * rate))
    sweep = _tone(np.geomspace(top_hz, bottom_hz, m), rate, np.ones(1)) * np.hanning(m)
    signal, at = np.zeros(n, np.float32), rng.uniform(0, 0.4) * n
    while at < n:
        part = signal[int(at) : int(at) + m]
        part += sweep[: len(part)] * rng.uniform(0.4, 1.0)
        at += max(gap_s, 0.02) * rate
        gap_s *= nearer
    return signal * (0.2 + _slow(rng, n, rate, 1.0))


@_calls
def cricket(rng: Generator, rate: int) -> Iterator[Any]:
    """Chirps: short groups of pulses on a high, steady carrier, a few groups a second."""
    carrier_hz, pulse_hz = rng.uniform(0.28, 0.4) * rate / 1.4, rng.uniform(22, 45)
    length_s, gap_s = rng.integers(2, 6) / pulse_hz, rng.uniform(0.1, 0.5)
    yield gap_s, gap_s * 1.1
    while True:
        yield _pulses(rng, rate, np.full(int(length_s * rate), pulse_hz), carrier_hz, 0.012)


@_calls
def fox(rng: Generator, rate: int) -> Iterator[Any]:
    """Barks: a hoarse tone whose pitch rises and falls, in series."""
    pitch_hz, arch = rng.uniform(350, 900), rng.uniform(0.15, 0.6)
    harmonics = rng.uniform(0.3, 1.0, 5) / np.arange(1, 6) ** rng.uniform(0.3, 1.0)
    yield 0.1, 0.7
    while True:
        m = int(rng.uniform(0.1, 0.35) * rate)
        hoarse = 1 + 0.05 * lfilter([0.2], [1, -0.8], rng.standard_normal(m))
        yield _tone(pitch_hz * (1 + arch * np.hanning(m)) * hoarse, rate, harmonics) * np.hanning(m) ** 0.5


@_calls
def frog(rng: Generator, rate: int) -> Iterator[Any]:
    """Croaks: a throat's resonance struck a few dozen times a second."""
    carrier_hz, pulse_hz, decay_s = rng.uniform(500, 2000), rng.uniform(22, 65), rng.uniform(0.004, 0.012)
    yield 0.1, 0.8
    while True:
        m = int(rng.uniform(0.15, 0.6) * rate)
        yield _pulses(rng, rate, pulse_hz * np.linspace(0.9, 1.1, m), carrier_hz, decay_s) * np.hanning(m) ** 0.4


def mosquito(rng: Generator, n: int, rate: int) -> Signal:
    """A thin whine that wavers and comes and goes."""
    pitch_hz, wavering = rng.uniform(380, 800), 0.06 * (_slow(rng, n, rate, 4) - 0.5)
    hz = pitch_hz * (1 + wavering + 0.004 * rng.standard_normal(n, dtype=np.float32))
    return _tone(hz, rate, rng.uniform(0.2, 1.0, 5)) * (0.1 + _slow(rng, n, rate, 1.5) ** 2)


def nightjar(rng: Generator, n: int, rate: int) -> Signal:
    """Churring: a pulse train that goes on and on, now and then at another rate."""
    switch = (_slow(rng, n, rate, 1.0) > 0.5).astype(np.float32)
    pulse_hz = rng.uniform(24, 44) * (1 + rng.uniform(0.1, 0.4) * switch)
    return _pulses(rng, rate, pulse_hz, rng.uniform(1200, 2400), 0.008) * (0.5 + _slow(rng, n, rate, 1.0))


@_calls
def owl(rng: Generator, rate: int) -> Iterator[Any]:
    """Hoots: a low, nearly pure tone that sinks a little."""
    pitch_hz, fall = rng.uniform(280, 750), rng.uniform(0.02, 0.12)
    harmonics = np.array([1.0, rng.uniform(0.1, 0.5), rng.uniform(0.02, 0.2)])
    yield 0.15, 0.9
    while True:
        m = int(rng.uniform(0.15, 0.55) * rate)
        yield _tone(pitch_hz * (1 - fall * np.linspace(0, 1, m)), rate, harmonics) * np.hanning(m) ** 0.7


def rain(rng: Generator, n: int, rate: int) -> Signal:
    """A hiss and the drops in it."""
    hiss = _noise(rng, n, rate, rng.uniform(300, 1500), 0.48 * rate, rng.uniform(0.0, 0.5))
    drops = np.zeros(n, np.float32)
    count = int(rng.uniform(10, 90) * n / rate)
    drops[rng.integers(0, n, count)] = rng.exponential(1.0, count)
    radius, turn = 0.97, 2 * np.pi * rng.uniform(0.08, 0.25)  # a resonance: each drop rings
    ringing = lfilter([1.0], [1.0, -2 * radius * np.cos(turn), radius**2], drops)
    return hiss + rng.uniform(0.2, 1.0) * _unit(ringing)


@_calls
def thunder(rng: Generator, rate: int) -> Iterator[Any]:
    """Claps: bursts of low noise with a sharp start that roll away."""
    yield 0.0, 1.2
    while True:
        m = int(rng.uniform(0.5, 2.0) * rate)
        roll = np.exp(-np.linspace(0, rng.uniform(3, 6), m)) * (0.4 + _slow(rng, m, rate, 8))
        yield _noise(rng, m, rate, 25, rng.uniform(150, 700), rng.uniform(0.3, 0.9)) * roll


def wind(rng: Generator, n: int, rate: int) -> Signal:
    """Gusts: low noise, swelling and whistling faintly."""
    gust = _slow(rng, n, rate, rng.uniform(0.6, 2.0)) ** 1.5
    rumble = _noise(rng, n, rate, 30, rng.uniform(300, 900), rng.uniform(0.5, 1.0))
    whistle = _noise(rng, n, rate, rng.uniform(500, 800), rng.uniform(900, 1600))
    return (rumble + rng.uniform(0.05, 0.5) * whistle * gust) * (0.15 + gust)


_SOUNDS = (bat, cricket, fox, frog, mosquito, nightjar, owl, rain, thunder, wind)
CLASSES = tuple(sound.__name__ for sound in _SOUNDS)


def clip(index: int, seed: int = 0, duration_s: float = 4.0, sample_rate_hz: int = 16000) -> Signal:
    """Return clip `index` of the set: [T] float32 within -1..1; its class is CLASSES[index % 10]."""
    rng = np.random.default_rng([seed, index])
    n, rate = round(duration_s * sample_rate_hz), sample_rate_hz
    signal = _unit(_SOUNDS[index % len(_SOUNDS)](rng, n, rate))
    for _ in range(rng.integers(0, DISTRACTORS + 1)):
        other = _SOUNDS[(index + rng.integers(1, len(_SOUNDS))) % len(_SOUNDS)]
        signal = signal + 10 ** (rng.uniform(*DISTRACTOR_DB) / 20) * _unit(other(rng, n, rate))
    m = int(rng.uniform(0.05, 0.4) * rate)  # the room: the direct sound and a dying tail of echoes, down by 60 dB at m
    room = rng.standard_normal(m, dtype=np.float32) * np.exp(-np.linspace(0, 6.9, m))
    room *= rng.uniform(0.1, 0.8) / np.linalg.norm(room)
    room[0] = 1.0
    signal = oaconvolve(signal, room.astype(np.float32))[:n]
    background = _noise(rng, n, rate, 40, 0.48 * rate, rng.uniform(0.0, 0.8))
    mixed = _unit(signal) + 10 ** (-rng.uniform(*NOISE_DB) / 20) * background
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max())).astype(np.float32)


def clip_path(folder: Path, index: int) -> Path:
    """Return where clip `index` lies; its format and its side of the split follow from the index, evenly."""
    take = index // len(CLASSES)
    side = "test" if take % 3 == 2 else "train"
    return folder / CLASSES[index % len(CLASSES)] / f"{take:05d}_{side}.{_FORMATS[take % len(_FORMATS)]}"


def generate(folder: str | Path | None = None, clips: int = 1000, duration_s: float = 4.0, sample_rate_hz: int = 16000,
             seed: int = 0) -> Path:  # fmt: skip
    """Return a folder of class-named subfolders with `clips` recordings (WAV, FLAC, OGG), made unless it is whole.

    It lies in `folder` (by default the cache's), under a name that carries its parameters, so that sets never mix.
    What an interrupted call left is completed. Raises UsageError for a folder that cannot be written.
    """
    parameters = {"clips": clips, "duration_s": float(duration_s), "sample_rate_hz": sample_rate_hz, "seed": seed,
                  "version": _VERSION}  # fmt: skip
    code = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:8]
    target = Path(folder or cache_root() / "night_sounds") / f"{clips}_clips_{duration_s:g}s_seed{seed}_{code}"

    def write(index: int) -> None:
        path, samples = clip_path(target, index), clip(index, seed, duration_s, sample_rate_hz)
        with atomic(path) as temporary:
            soundfile.write(temporary, samples, sample_rate_hz, format=path.suffix[1:])

    try:
        for name in CLASSES:
            (target / name).mkdir(parents=True, exist_ok=True)
        missing = [index for index in range(clips) if not clip_path(target, index).exists()]
        # numpy and libsndfile work outside Python's lock. An interruption cancels what `map` has not begun.
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(write, missing))
    except (OSError, soundfile.SoundFileError) as error:
        failed = f"night sounds cannot be written to {target} ({error})"
        raise UsageError(f"{failed}: free some space, or set SPEEDKIT_CACHE_DIR to another folder") from error
    return target
