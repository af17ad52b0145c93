"""Recordings of a night outdoors: six classes, synthesised and mixed into noisy clips, in class-named subfolders.

A clip is a function of its index alone: clips can be made in any order, and a larger set begins with the smaller.
"""

from pathlib import Path

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import butter, lfilter, sosfilt

from speedkit.workloads.generated import complete, in_classes

RATE_HZ, SAMPLES = 16_000, 64_000  # of a clip
CLIPS = 1152  # 768 to train on, 24 whole batches of 32, and 384 to test on
NOISE_DB = (-8.0, 8.0)  # the sound of the class over the background noise
OTHER_DB = (-12.0, 0.0)  # the sound of another class, relative to that of the class
VERSION = 3  # part of the folder's name: raise it when the sound of a clip changes
FORMATS = ("wav", "flac", "wav", "ogg")  # of the takes in turn; WAV and FLAC with 16 bits

# Each class is a tone, noise or pulses, in calls. Each number is drawn for a clip from a range: frequency [Hz], by
# what factor that changes during a call, pulses per second, length of a call and of the pause after it [s].
SOUNDS = {
    "bat": ("tone", (3500, 7000), (0.3, 0.6), (1, 1), (0.01, 0.05), (0.03, 0.3)),
    "cricket": ("pulses", (2500, 4500), (1, 1), (22, 45), (0.06, 0.3), (0.1, 0.5)),
    "frog": ("pulses", (700, 3000), (0.9, 1.1), (20, 60), (0.15, 0.6), (0.1, 0.8)),
    "owl": ("tone", (300, 900), (0.8, 1.1), (1, 1), (0.15, 0.6), (0.1, 0.9)),
    "rain": ("noise", (1000, 4000), (1, 1), (1, 1), (0.5, 4), (0, 0.3)),
    "wind": ("noise", (200, 1500), (1, 1), (1, 1), (0.5, 4), (0, 0.5)),
}
CLASSES = tuple(SOUNDS)


def unit(signal: NDArray) -> NDArray:
    """Return the signal at unit power."""
    return signal / (np.sqrt(np.mean(np.square(signal))) + 1e-9)


def sound(rng: Generator, name: str) -> NDArray:
    """Return the sound of a class [SAMPLES], of unit power."""
    primitive, *ranges = SOUNDS[name]
    hz, bend, pulse_hz, call_s, pause_s = (rng.uniform(*ends) for ends in ranges)
    time_s = np.arange(SAMPLES) / RATE_HZ + rng.uniform(0, 4)
    through = time_s % (call_s + pause_s) / call_s  # 0..1 during a call, above in the pause
    loudness = np.sqrt(np.maximum(np.sin(np.pi * np.minimum(through, 1)), 0))
    if primitive == "noise":
        band = butter(1, (hz / 2, min(2 * hz, 0.49 * RATE_HZ)), "bandpass", fs=RATE_HZ, output="sos")
        return unit(loudness * sosfilt(band, rng.standard_normal(SAMPLES)))
    tone = np.sin(2 * np.pi * np.cumsum(hz * bend ** np.minimum(through, 1)) / RATE_HZ)
    if primitive == "pulses":
        loudness = loudness * np.exp(-4 * (time_s * pulse_hz % 1))
    return unit(loudness * tone)


def clip(index: int) -> NDArray[np.float32]:
    """Return clip `index` of the set: [T] float32 within -1..1; its class is CLASSES[index % 6]."""
    rng = np.random.default_rng([0, index])
    other = CLASSES[(index + rng.integers(1, len(CLASSES))) % len(CLASSES)]
    background = lfilter([1.0], [1.0, -rng.uniform(0, 0.95)], rng.standard_normal(SAMPLES))
    mixed = sound(rng, CLASSES[index % len(CLASSES)])
    mixed = mixed + 10 ** (rng.uniform(*OTHER_DB) / 20) * sound(rng, other)
    mixed = mixed + 10 ** (-rng.uniform(*NOISE_DB) / 20) * unit(background)
    level = 10 ** (rng.uniform(-18, -1) / 20)  # how far the microphone was turned up
    return (mixed * (level / np.abs(mixed).max())).astype(np.float32)


def generate(clips: int = CLIPS) -> Path:
    """Return a folder of class-named subfolders with `clips` recordings (WAV, FLAC, Ogg), as `complete` makes it."""

    def write(index: int, path: Path, format: str) -> None:
        soundfile.write(path, clip(index), RATE_HZ, format=format)

    paths = [in_classes(index, CLASSES, FORMATS) for index in range(clips)]
    return complete(f"night_sounds/{clips}_clips_4s_16000hz_seed0_v{VERSION}", paths, write)
