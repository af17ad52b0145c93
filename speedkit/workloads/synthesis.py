"""The sounds of a night outdoors: ten classes, synthesised from first principles and mixed into noisy clips.

A clip is a function of (seed, index) alone: clips can be made in any order, and a larger set begins with the smaller.
"""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import lfilter, oaconvolve

Signal = NDArray[np.float32]  # [n], one channel
NOISE_DB = (-7.0, 12.0)  # the sound of the class over the background noise
DISTRACTOR_DB = (-14.0, -2.0)  # the sound of another class, relative to that of the class
DISTRACTORS = 2  # at most so many in a clip


def _normal(rng: Generator, n: int) -> Signal:
    return rng.standard_normal(n, dtype=np.float32)


def _noise(rng: Generator, n: int, rate: int, low_hz: float, high_hz: float, slope: float = 0.0) -> Signal:
    """Return noise [n] between two frequencies, its amplitude falling as frequency ** -slope, of unit power."""
    spectrum = np.fft.rfft(_normal(rng, n))
    hz = np.fft.rfftfreq(n, 1 / rate)
    edge = 1 / (1 + (low_hz / np.maximum(hz, 1.0)) ** 8) / (1 + (hz / high_hz) ** 8)
    return _unit(np.fft.irfft(spectrum * np.sqrt(edge) * np.maximum(hz, 20.0) ** -slope, n))


def _slow(rng: Generator, n: int, rate: int, rate_hz: float) -> Signal:
    """Return a random curve [n] between 0 and 1 that changes about `rate_hz` times a second."""
    points = rng.random(max(3, int(n / rate * rate_hz) + 2))
    return np.interp(np.linspace(0, len(points) - 1, n), np.arange(len(points)), points).astype(np.float32)


def _unit(signal: NDArray) -> Signal:
    """Return the signal at unit power."""
    return (signal / (np.sqrt(np.mean(np.square(signal))) + 1e-9)).astype(np.float32)


def _tone(hz: NDArray, rate: int, harmonics: NDArray) -> NDArray:
    """Return a harmonic tone whose fundamental follows `hz` [n], the harmonics at the given amplitudes."""
    phase = 2 * np.pi * np.cumsum(hz) / rate
    return sum(amplitude * np.sin((k + 1) * phase) for k, amplitude in enumerate(harmonics))


def _calls(rng: Generator, n: int, rate: int, gap_s: tuple, call: Callable[[], NDArray]) -> Signal:
    """Return calls placed one after another with random gaps between them, from a random start, [n]."""
    signal = np.zeros(n, np.float32)
    at = int(rng.uniform(0, 0.25) * n)
    while at < n:
        one = call()[: n - at]
        signal[at : at + len(one)] += one * rng.uniform(0.6, 1.0)
        at += len(one) + int(rng.uniform(*gap_s) * rate)
    return signal


def _owl(rng: Generator, n: int, rate: int) -> Signal:
    """Hoots: a low, nearly pure tone that sinks a little."""
    pitch_hz, fall = rng.uniform(280, 750), rng.uniform(0.02, 0.12)
    harmonics = np.array([1.0, rng.uniform(0.1, 0.5), rng.uniform(0.02, 0.2)])

    def hoot() -> NDArray:
        m = int(rng.uniform(0.15, 0.55) * rate)
        return _tone(pitch_hz * (1 - fall * np.linspace(0, 1, m)), rate, harmonics) * np.hanning(m) ** 0.7

    return _calls(rng, n, rate, (0.15, 0.9), hoot)


def _fox(rng: Generator, n: int, rate: int) -> Signal:
    """Barks: a hoarse tone whose pitch rises and falls, in series."""
    pitch_hz, arch = rng.uniform(350, 900), rng.uniform(0.15, 0.6)
    harmonics = rng.uniform(0.3, 1.0, 5) / np.arange(1, 6) ** rng.uniform(0.3, 1.0)

    def bark() -> NDArray:
        m = int(rng.uniform(0.1, 0.35) * rate)
        hoarse = 1 + 0.05 * lfilter([0.2], [1, -0.8], rng.standard_normal(m))
        return _tone(pitch_hz * (1 + arch * np.hanning(m)) * hoarse, rate, harmonics) * np.hanning(m) ** 0.5

    return _calls(rng, n, rate, (0.1, 0.7), bark)


def _mosquito(rng: Generator, n: int, rate: int) -> Signal:
    """A thin whine that wavers and comes and goes."""
    hz = rng.uniform(380, 800) * (1 + 0.06 * (_slow(rng, n, rate, 4) - 0.5) + 0.004 * _normal(rng, n))
    return _tone(hz, rate, rng.uniform(0.2, 1.0, 5)) * (0.1 + _slow(rng, n, rate, 1.5) ** 2)


def _pulses(rng: Generator, n: int, rate: int, pulse_hz: NDArray, carrier_hz: float, decay_s: float) -> NDArray:
    """Return a carrier struck `pulse_hz` [n] times a second, each pulse dying away within about `decay_s`."""
    cycles = np.cumsum(pulse_hz) / rate
    since_s = (cycles % 1) / pulse_hz
    carrier = np.sin(2 * np.pi * carrier_hz * np.arange(n) / rate + rng.uniform(0, 6.28))
    return carrier * np.exp(-since_s / decay_s) * (1 - np.exp(-since_s / (decay_s / 6)))


def _frog(rng: Generator, n: int, rate: int) -> Signal:
    """Croaks: a throat's resonance struck a few dozen times a second."""
    carrier_hz, pulse_hz, decay_s = rng.uniform(500, 2000), rng.uniform(22, 65), rng.uniform(0.004, 0.012)

    def croak() -> NDArray:
        m = int(rng.uniform(0.15, 0.6) * rate)
        return _pulses(rng, m, rate, pulse_hz * np.linspace(0.9, 1.1, m), carrier_hz, decay_s) * np.hanning(m) ** 0.4

    return _calls(rng, n, rate, (0.1, 0.8), croak)


def _nightjar(rng: Generator, n: int, rate: int) -> Signal:
    """Churring: a pulse train that goes on and on, now and then at another rate."""
    switch = (_slow(rng, n, rate, 1.0) > 0.5).astype(np.float32)
    pulse_hz = rng.uniform(24, 44) * (1 + rng.uniform(0.1, 0.4) * switch)
    return _pulses(rng, n, rate, pulse_hz, rng.uniform(1200, 2400), 0.008) * (0.5 + _slow(rng, n, rate, 1.0))


def _cricket(rng: Generator, n: int, rate: int) -> Signal:
    """Chirps: short groups of pulses on a high, steady carrier, a few groups a second."""
    carrier_hz, pulse_hz = rng.uniform(0.28, 0.4) * rate / 1.4, rng.uniform(22, 45)
    length_s, gap_s = rng.integers(2, 6) / pulse_hz, rng.uniform(0.1, 0.5)

    def chirp() -> NDArray:
        m = int(length_s * rate)
        return _pulses(rng, m, rate, np.full(m, pulse_hz), carrier_hz, 0.012)

    return _calls(rng, n, rate, (gap_s, gap_s * 1.1), chirp)


def _bat(rng: Generator, n: int, rate: int) -> Signal:
    """Sweeps as a bat detector makes them audible: short, falling fast, closer and closer together."""
    top_hz, bottom_hz = rng.uniform(0.3, 0.47) * rate, rng.uniform(0.1, 0.22) * rate
    length_s, gap_s, nearer = rng.uniform(0.006, 0.035), rng.uniform(0.08, 0.35), rng.uniform(0.85, 1.0)
    signal, at = np.zeros(n, np.float32), rng.uniform(0, 0.4) * n
    while at < n:
        m = max(16, int(length_s * rate))
        sweep = _tone(np.geomspace(top_hz, bottom_hz, m), rate, np.ones(1)) * np.hanning(m)
        sweep = sweep[: n - int(at)]
        signal[int(at) : int(at) + len(sweep)] += sweep * rng.uniform(0.4, 1.0)
        at += max(gap_s, 0.02) * rate
        gap_s *= nearer
    return signal * (0.2 + _slow(rng, n, rate, 1.0))


def _rain(rng: Generator, n: int, rate: int) -> Signal:
    """A hiss and the drops in it."""
    hiss = _noise(rng, n, rate, rng.uniform(300, 1500), 0.48 * rate, rng.uniform(0.0, 0.5))
    drops = np.zeros(n, np.float32)
    count = int(rng.uniform(10, 90) * n / rate)
    drops[rng.integers(0, n, count)] = rng.exponential(1.0, count)
    radius, turn = 0.97, 2 * np.pi * rng.uniform(0.08, 0.25)  # a resonance: each drop rings
    ringing = lfilter([1.0], [1.0, -2 * radius * np.cos(turn), radius**2], drops)
    return hiss + rng.uniform(0.2, 1.0) * _unit(ringing)


def _wind(rng: Generator, n: int, rate: int) -> Signal:
    """Gusts: low noise, swelling and whistling faintly."""
    gust = _slow(rng, n, rate, rng.uniform(0.6, 2.0)) ** 1.5
    rumble = _noise(rng, n, rate, 30, rng.uniform(300, 900), rng.uniform(0.5, 1.0))
    whistle = _noise(rng, n, rate, rng.uniform(500, 800), rng.uniform(900, 1600))
    return (rumble + rng.uniform(0.05, 0.5) * whistle * gust) * (0.15 + gust)


def _thunder(rng: Generator, n: int, rate: int) -> Signal:
    """Claps: bursts of low noise with a sharp start that roll away."""

    def clap() -> NDArray:
        m = int(rng.uniform(0.5, 2.0) * rate)
        roll = np.exp(-np.linspace(0, rng.uniform(3, 6), m)) * (0.4 + _slow(rng, m, rate, 8))
        return _noise(rng, m, rate, 25, rng.uniform(150, 700), rng.uniform(0.3, 0.9)) * roll

    return _calls(rng, n, rate, (0.0, 1.2), clap)


_SOUNDS: dict[str, Callable[[Generator, int, int], Signal]] = {
    "bat": _bat,
    "cricket": _cricket,
    "fox": _fox,
    "frog": _frog,
    "mosquito": _mosquito,
    "nightjar": _nightjar,
    "owl": _owl,
    "rain": _rain,
    "thunder": _thunder,
    "wind": _wind,
}
CLASSES = tuple(_SOUNDS)


def _room(rng: Generator, rate: int) -> Signal:
    """Return an impulse response: the direct sound and an exponentially dying tail of echoes."""
    n = int(rng.uniform(0.05, 0.4) * rate)
    tail = _normal(rng, n) * np.exp(-np.linspace(0, 6.9, n))  # 60 dB down at its end, as reverberation times are told
    tail *= rng.uniform(0.1, 0.8) / np.linalg.norm(tail)
    tail[0] = 1.0
    return tail.astype(np.float32)


def clip(index: int, seed: int = 0, duration_s: float = 4.0, sample_rate_hz: int = 16000) -> Signal:
    """Return clip `index` of the set: [T] float32 within -1..1; its class is CLASSES[index % 10]."""
    rng = np.random.default_rng([seed, index])
    n = round(duration_s * sample_rate_hz)
    label = index % len(CLASSES)
    signal = _unit(_SOUNDS[CLASSES[label]](rng, n, sample_rate_hz))
    for _ in range(rng.integers(0, DISTRACTORS + 1)):
        other = CLASSES[(label + rng.integers(1, len(CLASSES))) % len(CLASSES)]
        gain = 10 ** (rng.uniform(*DISTRACTOR_DB) / 20)
        signal = signal + gain * _unit(_SOUNDS[other](rng, n, sample_rate_hz))
    signal = oaconvolve(signal, _room(rng, sample_rate_hz))[:n]
    background = _noise(rng, n, sample_rate_hz, 40, 0.48 * sample_rate_hz, rng.uniform(0.0, 0.8))
    mixed = _unit(signal) + 10 ** (-rng.uniform(*NOISE_DB) / 20) * background
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max())).astype(np.float32)
