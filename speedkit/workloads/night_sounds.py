"""Recordings of a night outdoors: ten classes, synthesised and mixed into noisy clips, in class-named subfolders.

A clip is a function of (seed, index) alone: clips can be made in any order, and a larger set begins with the smaller.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import lfilter, oaconvolve

from speedkit.hardware import cache_root
from speedkit.workloads.generated import complete

NOISE_DB = (-7.0, 12.0)  # the sound of the class over the background noise
DISTRACTOR_DB = (-14.0, -2.0)  # the sound of another class, relative to that of the class
DISTRACTORS = 2  # at most so many in a clip
_VERSION = 2  # part of the folder's name: raise it when the sound of a clip changes
_FORMATS = ("wav", "flac", "wav", "ogg")  # of the takes in turn; WAV and FLAC with 16 bits


class _Synth(NamedTuple):
    """What sounds are made with: random numbers, the samples of a clip and its sample rate in Hz."""

    rng: Generator
    n: int
    rate: int

    def noise(self, n: int, low_hz: float, high_hz: float, slope: float = 0.0) -> NDArray:
        """Return noise [n] between two frequencies, its amplitude falling as frequency ** -slope, of unit power."""
        spectrum = np.fft.rfft(self.rng.standard_normal(n, dtype=np.float32))
        hz = np.fft.rfftfreq(n, 1 / self.rate)
        edge = 1 / (1 + (low_hz / np.maximum(hz, 1.0)) ** 8) / (1 + (hz / high_hz) ** 8)
        return _unit(np.fft.irfft(spectrum * np.sqrt(edge) * np.maximum(hz, 20.0) ** -slope, n))

    def slow(self, n: int, rate_hz: float) -> NDArray:
        """Return a random curve [n] between 0 and 1 that changes about `rate_hz` times a second."""
        points = self.rng.random(max(3, int(n / self.rate * rate_hz) + 2))
        return np.interp(np.linspace(0, len(points) - 1, n), np.arange(len(points)), points)

    def tone(self, hz: NDArray, harmonics: Any = (1.0,)) -> NDArray:
        """Return a tone whose fundamental follows `hz` [n], its harmonics at the given amplitudes."""
        phase = 2 * np.pi * np.cumsum(hz) / self.rate
        return sum(amplitude * np.sin((k + 1) * phase) for k, amplitude in enumerate(harmonics))

    def pulses(self, pulse_hz: NDArray, carrier_hz: float, decay_s: float) -> NDArray:
        """Return a carrier struck `pulse_hz` [n] times a second, each pulse dying away within about `decay_s`."""
        since_s = (np.cumsum(pulse_hz) / self.rate % 1) / pulse_hz
        carrier = np.sin(2 * np.pi * carrier_hz * np.arange(len(pulse_hz)) / self.rate + self.rng.uniform(0, 6.28))
        return carrier * np.exp(-since_s / decay_s) * (1 - np.exp(-since_s / (decay_s / 6)))

    def calls(self, gap_s: tuple, length_s: tuple, call: Callable[[int], NDArray]) -> NDArray:
        """Return calls of random length [m] at random gaps, each at a loudness of its own."""
        signal, at = np.zeros(self.n), int(self.rng.uniform(0, 0.25) * self.n)
        while at < self.n:
            m = max(16, int(self.rng.uniform(*length_s) * self.rate))
            signal[at : at + m] += call(m)[: self.n - at] * self.rng.uniform(0.6, 1.0)
            at += m + int(self.rng.uniform(*gap_s) * self.rate)
        return signal


# Each class: the ranges that its parameters are drawn from, once per clip, and the sound made with them.
_SOUNDS: dict[str, tuple[tuple[tuple[float, float], ...], Callable[..., NDArray]]] = {
    # Sweeps as a bat detector makes them audible: short and falling fast.
    "bat": (
        ((0.3, 0.47), (0.1, 0.22), (0.006, 0.035), (0.03, 0.3)),
        lambda s, top, bottom, length_s, gap_s: (
            s.calls(
                (gap_s, gap_s),
                (length_s, length_s),
                lambda m: s.tone(np.geomspace(top, bottom, m) * s.rate) * np.hanning(m),
            )
            * (0.2 + s.slow(s.n, 1.0))
        ),
    ),
    # Chirps: short groups of pulses on a high, steady carrier, a few groups a second.
    "cricket": (
        ((0.2, 0.28), (22, 45), (0.06, 0.2), (0.1, 0.5)),
        lambda s, carrier, pulse_hz, length_s, gap_s: s.calls(
            (gap_s, gap_s * 1.1),
            (length_s, length_s),
            lambda m: s.pulses(np.full(m, pulse_hz), carrier * s.rate, 0.012),
        ),
    ),
    # Barks: a hoarse tone whose pitch rises and falls, in series.
    "fox": (
        ((350, 900), (0.15, 0.6), (0.5, 1.5)),
        lambda s, pitch_hz, arch, dull: s.calls(
            (0.1, 0.7),
            (0.1, 0.35),
            lambda m: (
                np.hanning(m) ** 0.5
                * s.tone(
                    pitch_hz
                    * (1 + arch * np.hanning(m))
                    * (1 + 0.05 * lfilter([0.2], [1, -0.8], s.rng.standard_normal(m))),
                    np.arange(1, 6.0) ** -dull,
                )
            ),
        ),
    ),
    # Croaks: a throat's resonance struck a few dozen times a second.
    "frog": (
        ((500, 2000), (22, 65), (0.004, 0.012)),
        lambda s, carrier_hz, pulse_hz, decay_s: s.calls(
            (0.1, 0.8),
            (0.15, 0.6),
            lambda m: s.pulses(pulse_hz * np.linspace(0.9, 1.1, m), carrier_hz, decay_s) * np.hanning(m) ** 0.4,
        ),
    ),
    # A thin whine that wavers and comes and goes.
    "mosquito": (
        ((380, 800),),
        lambda s, pitch_hz: (
            (0.1 + s.slow(s.n, 1.5) ** 2)
            * s.tone(
                pitch_hz * (0.97 + 0.06 * s.slow(s.n, 4) + 0.004 * s.rng.standard_normal(s.n)),
                s.rng.uniform(0.2, 1.0, 5),
            )
        ),
    ),
    # Churring: a pulse train that goes on and on, now and then at another rate.
    "nightjar": (
        ((24, 44), (0.1, 0.4), (1200, 2400)),
        lambda s, pulse_hz, faster, carrier_hz: (
            s.pulses(pulse_hz * (1 + faster * (s.slow(s.n, 1.0) > 0.5)), carrier_hz, 0.008) * (0.5 + s.slow(s.n, 1.0))
        ),
    ),
    # Hoots: a low, nearly pure tone that sinks a little.
    "owl": (
        ((280, 750), (0.02, 0.12), (0.1, 0.5)),
        lambda s, pitch_hz, fall, second: s.calls(
            (0.15, 0.9),
            (0.15, 0.55),
            lambda m: s.tone(pitch_hz * np.linspace(1, 1 - fall, m), (1.0, second, 0.1)) * np.hanning(m) ** 0.7,
        ),
    ),
    # A hiss, and the drops in it: each rings at a resonance.
    "rain": (
        ((300, 1500), (0.0, 0.5), (10, 90), (0.5, 1.6), (0.2, 1.0)),
        lambda s, low_hz, slope, drops_hz, turn, loud: (
            s.noise(s.n, low_hz, 0.48 * s.rate, slope)
            + loud
            * _unit(
                lfilter(
                    [1.0],
                    [1.0, -1.94 * np.cos(turn), 0.94],
                    (s.rng.random(s.n) < drops_hz / s.rate) * s.rng.exponential(1.0, s.n),
                )
            )
        ),
    ),
    # Claps: bursts of low noise with a sharp start that roll away.
    "thunder": (
        ((150, 700), (0.3, 0.9), (3, 6)),
        lambda s, high_hz, slope, fade: s.calls(
            (0.0, 1.2),
            (0.5, 2.0),
            lambda m: s.noise(m, 25, high_hz, slope) * np.exp(-np.linspace(0, fade, m)) * (0.4 + s.slow(m, 8)),
        ),
    ),
    # Gusts: low noise, swelling and whistling faintly.
    "wind": (
        ((300, 900), (0.5, 1.0), (0.02, 0.25), (0.6, 2.0)),
        lambda s, high_hz, slope, whistle, gust_hz: (
            (s.noise(s.n, 30, high_hz, slope) + whistle * s.noise(s.n, 650, 1250))
            * (0.15 + s.slow(s.n, gust_hz) ** 1.5)
        ),
    ),
}
CLASSES = tuple(_SOUNDS)


def _unit(signal: NDArray) -> NDArray:
    """Return the signal at unit power."""
    return signal / (np.sqrt(np.mean(np.square(signal))) + 1e-9)


def clip(index: int, seed: int = 0, duration_s: float = 4.0, sample_rate_hz: int = 16000) -> NDArray[np.float32]:
    """Return clip `index` of the set: [T] float32 within -1..1; its class is CLASSES[index % 10]."""
    rng, n = np.random.default_rng([seed, index]), round(duration_s * sample_rate_hz)
    synth = _Synth(rng, n, sample_rate_hz)

    def sound(index: int) -> NDArray:
        ranges, made_of = _SOUNDS[CLASSES[index % len(CLASSES)]]
        return _unit(made_of(synth, *(rng.uniform(*ends) for ends in ranges)))

    signal = sound(index)
    for _ in range(rng.integers(0, DISTRACTORS + 1)):
        other = index + int(rng.integers(1, len(CLASSES)))
        signal = signal + 10 ** (rng.uniform(*DISTRACTOR_DB) / 20) * sound(other)
    # The room: the direct sound and a dying tail of echoes, down by 60 dB at its end.
    tail = int(rng.uniform(0.05, 0.4) * sample_rate_hz)
    room = rng.standard_normal(tail) * np.exp(-np.linspace(0, 6.9, tail))
    room *= rng.uniform(0.1, 0.8) / np.linalg.norm(room)
    room[0] = 1.0
    background = synth.noise(n, 40, 0.48 * sample_rate_hz, rng.uniform(0.0, 0.8))
    mixed = _unit(oaconvolve(signal, room)[:n]) + 10 ** (-rng.uniform(*NOISE_DB) / 20) * background
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max())).astype(np.float32)


def clip_path(folder: Path, index: int) -> Path:
    """Return where clip `index` lies; its format and its side of the split follow from the index, evenly."""
    take = index // len(CLASSES)
    side = "test" if take % 3 == 2 else "train"
    return folder / CLASSES[index % len(CLASSES)] / f"{take:05d}_{side}.{_FORMATS[take % len(_FORMATS)]}"


def generate(
    folder: str | Path | None = None,
    clips: int = 1000,
    duration_s: float = 4.0,
    sample_rate_hz: int = 16000,
    seed: int = 0,
) -> Path:
    """Return a folder of class-named subfolders with `clips` recordings, as `generated.complete` makes it.

    It lies in `folder` (by default the cache's), under a name that carries its parameters, so that sets never mix.
    """
    name = f"{clips}_clips_{duration_s:g}s_{sample_rate_hz}hz_seed{seed}_v{_VERSION}"
    target = Path(folder or cache_root() / "night_sounds") / name

    def write(index: int, path: Path) -> None:
        form = clip_path(target, index).suffix[1:]
        soundfile.write(path, clip(index, seed, duration_s, sample_rate_hz), sample_rate_hz, format=form)

    return complete(target, [clip_path(target, index) for index in range(clips)], write, "night sounds")
