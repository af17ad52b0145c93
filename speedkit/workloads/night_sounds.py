"""Recordings of a night outdoors: ten classes, synthesised and mixed into noisy clips, in class-named subfolders.

A clip is a function of its index alone: clips can be made in any order, and a larger set begins with the smaller.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import lfilter, oaconvolve

from speedkit.workloads.generated import complete, in_classes

RATE_HZ, SAMPLES = 16_000, 64_000  # of a clip
CLIPS = 1200  # 800 to train on, 25 whole batches of 32, and 400 to test on
NOISE_DB = (-7.0, 12.0)  # the sound of the class over the background noise
DISTRACTOR_DB = (-14.0, -2.0)  # the sound of another class, relative to that of the class
DISTRACTORS = 2  # at most so many in a clip
VERSION = 2  # part of the folder's name: raise it when the sound of a clip changes
FORMATS = ("wav", "flac", "wav", "ogg")  # of the takes in turn; WAV and FLAC with 16 bits

Range = tuple[float, float]


class Synthesiser:
    """What sounds are made of, with random numbers of one generator. Lengths are in samples."""

    def __init__(self, rng: Generator):
        self.rng = rng

    def noise(self, n: int, low_hz: float, high_hz: float, slope: float = 0.0) -> NDArray:
        """Return noise [n] between two frequencies, its amplitude falling as frequency ** -slope, of unit power."""
        spectrum = np.fft.rfft(self.rng.standard_normal(n, dtype=np.float32))
        hz = np.fft.rfftfreq(n, 1 / RATE_HZ)
        edge = 1 / (1 + (low_hz / np.maximum(hz, 1.0)) ** 8) / (1 + (hz / high_hz) ** 8)
        return unit(np.fft.irfft(spectrum * np.sqrt(edge) * np.maximum(hz, 20.0) ** -slope, n))

    def slow(self, rate_hz: float, n: int = SAMPLES) -> NDArray:
        """Return a random curve [n] between 0 and 1 that changes about `rate_hz` times a second."""
        points = self.rng.random(max(3, int(n / RATE_HZ * rate_hz) + 2))
        return np.interp(np.linspace(0, len(points) - 1, n), np.arange(len(points)), points)

    def tone(self, hz: NDArray, harmonics: Sequence[float] | NDArray = (1.0,)) -> NDArray:
        """Return a tone whose fundamental follows `hz` [n], its harmonics at the given amplitudes."""
        phase = 2 * np.pi * np.cumsum(hz) / RATE_HZ
        return sum(amplitude * np.sin((k + 1) * phase) for k, amplitude in enumerate(harmonics))

    def pulses(self, pulse_hz: NDArray, carrier_hz: float, decay_s: float) -> NDArray:
        """Return a carrier struck `pulse_hz` [n] times a second, each pulse dying away within about `decay_s`."""
        since_s = (np.cumsum(pulse_hz) / RATE_HZ % 1) / pulse_hz
        carrier = np.sin(2 * np.pi * carrier_hz * np.arange(len(pulse_hz)) / RATE_HZ + self.rng.uniform(0, 6.28))
        return carrier * np.exp(-since_s / decay_s) * (1 - np.exp(-since_s / (decay_s / 6)))

    def calls(self, gap_s: Range, length_s: Range, call: Callable[[int], NDArray]) -> NDArray:
        """Return calls of random length [m] at random gaps, each at a loudness of its own."""
        signal, at = np.zeros(SAMPLES), int(self.rng.uniform(0, 0.25) * SAMPLES)
        while at < SAMPLES:
            m = max(16, int(self.rng.uniform(*length_s) * RATE_HZ))
            signal[at : at + m] += call(m)[: SAMPLES - at] * self.rng.uniform(0.6, 1.0)
            at += m + int(self.rng.uniform(*gap_s) * RATE_HZ)
        return signal

    def draw(self, *ranges: Range) -> list[float]:
        """Return the parameters of a sound, one out of each range."""
        return [self.rng.uniform(*ends) for ends in ranges]


def bat(s: Synthesiser) -> NDArray:
    """Sweeps as a bat detector makes them audible: short and falling fast."""
    top, bottom, length_s, gap_s = s.draw((0.3, 0.47), (0.1, 0.22), (0.006, 0.035), (0.03, 0.3))

    def sweep(m: int) -> NDArray:
        return s.tone(np.geomspace(top, bottom, m) * RATE_HZ) * np.hanning(m)

    return s.calls((gap_s, gap_s), (length_s, length_s), sweep) * (0.2 + s.slow(1.0))


def cricket(s: Synthesiser) -> NDArray:
    """Chirps: short groups of pulses on a high, steady carrier, a few groups a second."""
    carrier, pulse_hz, length_s, gap_s = s.draw((0.2, 0.28), (22, 45), (0.06, 0.2), (0.1, 0.5))
    chirp_gap_s, chirp_s = (gap_s, gap_s * 1.1), (length_s, length_s)
    return s.calls(chirp_gap_s, chirp_s, lambda m: s.pulses(np.full(m, pulse_hz), carrier * RATE_HZ, 0.012))


def fox(s: Synthesiser) -> NDArray:
    """Barks: a hoarse tone whose pitch rises and falls, in series."""
    pitch_hz, arch, dull = s.draw((350, 900), (0.15, 0.6), (0.5, 1.5))

    def bark(m: int) -> NDArray:
        hoarse = 1 + 0.05 * lfilter([0.2], [1, -0.8], s.rng.standard_normal(m))
        hz = pitch_hz * (1 + arch * np.hanning(m)) * hoarse
        return np.hanning(m) ** 0.5 * s.tone(hz, np.arange(1, 6.0) ** -dull)

    return s.calls((0.1, 0.7), (0.1, 0.35), bark)


def frog(s: Synthesiser) -> NDArray:
    """Croaks: a throat's resonance struck a few dozen times a second."""
    carrier_hz, pulse_hz, decay_s = s.draw((500, 2000), (22, 65), (0.004, 0.012))

    def croak(m: int) -> NDArray:
        return s.pulses(pulse_hz * np.linspace(0.9, 1.1, m), carrier_hz, decay_s) * np.hanning(m) ** 0.4

    return s.calls((0.1, 0.8), (0.15, 0.6), croak)


def mosquito(s: Synthesiser) -> NDArray:
    """A thin whine that wavers and comes and goes."""
    [pitch_hz] = s.draw((380, 800))
    swell = 0.1 + s.slow(1.5) ** 2
    hz = pitch_hz * (0.97 + 0.06 * s.slow(4) + 0.004 * s.rng.standard_normal(SAMPLES))
    return swell * s.tone(hz, s.rng.uniform(0.2, 1.0, 5))


def nightjar(s: Synthesiser) -> NDArray:
    """Churring: a pulse train that goes on and on, now and then at another rate."""
    pulse_hz, faster, carrier_hz = s.draw((24, 44), (0.1, 0.4), (1200, 2400))
    train = s.pulses(pulse_hz * (1 + faster * (s.slow(1.0) > 0.5)), carrier_hz, 0.008)
    return train * (0.5 + s.slow(1.0))


def owl(s: Synthesiser) -> NDArray:
    """Hoots: a low, nearly pure tone that sinks a little."""
    pitch_hz, fall, second = s.draw((280, 750), (0.02, 0.12), (0.1, 0.5))

    def hoot(m: int) -> NDArray:
        return s.tone(pitch_hz * np.linspace(1, 1 - fall, m), (1.0, second, 0.1)) * np.hanning(m) ** 0.7

    return s.calls((0.15, 0.9), (0.15, 0.55), hoot)


def rain(s: Synthesiser) -> NDArray:
    """A hiss, and the drops in it: each rings at a resonance."""
    low_hz, slope, drops_hz, turn, loud = s.draw((300, 1500), (0.0, 0.5), (10, 90), (0.5, 1.6), (0.2, 1.0))
    hiss = s.noise(SAMPLES, low_hz, 0.48 * RATE_HZ, slope)
    drops = (s.rng.random(SAMPLES) < drops_hz / RATE_HZ) * s.rng.exponential(1.0, SAMPLES)
    return hiss + loud * unit(lfilter([1.0], [1.0, -1.94 * np.cos(turn), 0.94], drops))


def thunder(s: Synthesiser) -> NDArray:
    """Claps: bursts of low noise with a sharp start that roll away."""
    high_hz, slope, fade = s.draw((150, 700), (0.3, 0.9), (3, 6))

    def clap(m: int) -> NDArray:
        return s.noise(m, 25, high_hz, slope) * np.exp(-np.linspace(0, fade, m)) * (0.4 + s.slow(8, m))

    return s.calls((0.0, 1.2), (0.5, 2.0), clap)


def wind(s: Synthesiser) -> NDArray:
    """Gusts: low noise, swelling and whistling faintly."""
    high_hz, slope, whistle, gust_hz = s.draw((300, 900), (0.5, 1.0), (0.02, 0.25), (0.6, 2.0))
    low = s.noise(SAMPLES, 30, high_hz, slope) + whistle * s.noise(SAMPLES, 650, 1250)
    return low * (0.15 + s.slow(gust_hz) ** 1.5)


SOUNDS = (bat, cricket, fox, frog, mosquito, nightjar, owl, rain, thunder, wind)
CLASSES = tuple(sound.__name__ for sound in SOUNDS)


def unit(signal: NDArray) -> NDArray:
    """Return the signal at unit power."""
    return signal / (np.sqrt(np.mean(np.square(signal))) + 1e-9)


def clip(index: int) -> NDArray[np.float32]:
    """Return clip `index` of the set: [T] float32 within -1..1; its class is CLASSES[index % 10]."""
    rng = np.random.default_rng([0, index])
    synthesiser = Synthesiser(rng)
    signal = unit(SOUNDS[index % len(SOUNDS)](synthesiser))
    for _ in range(rng.integers(0, DISTRACTORS + 1)):
        other = SOUNDS[(index + int(rng.integers(1, len(SOUNDS)))) % len(SOUNDS)]
        signal = signal + 10 ** (rng.uniform(*DISTRACTOR_DB) / 20) * unit(other(synthesiser))
    # The room: the direct sound and a dying tail of echoes, down by 60 dB at its end.
    tail = int(rng.uniform(0.05, 0.4) * RATE_HZ)
    room = rng.standard_normal(tail) * np.exp(-np.linspace(0, 6.9, tail))
    room *= rng.uniform(0.1, 0.8) / np.linalg.norm(room)
    room[0] = 1.0
    background = synthesiser.noise(SAMPLES, 40, 0.48 * RATE_HZ, rng.uniform(0.0, 0.8))
    mixed = unit(oaconvolve(signal, room)[:SAMPLES]) + 10 ** (-rng.uniform(*NOISE_DB) / 20) * background
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max())).astype(np.float32)


def generate(clips: int = CLIPS) -> Path:
    """Return a folder of class-named subfolders with `clips` recordings (WAV, FLAC, Ogg), as `complete` makes it."""

    def write(index: int, path: Path, format: str) -> None:
        soundfile.write(path, clip(index), RATE_HZ, format=format)

    paths = [in_classes(index, CLASSES, FORMATS) for index in range(clips)]
    return complete(f"night_sounds/{clips}_clips_4s_16000hz_seed0_v{VERSION}", paths, write)
