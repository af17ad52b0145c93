"""Generated recordings: a night outdoors in six classes, and utterances of an invented language."""

import functools
from pathlib import Path

import numpy as np
import soundfile
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.signal import butter, lfilter, sosfilt

from speedkit.lab.workloads.generated import complete, in_classes

RATE_HZ = 16_000
save = functools.partial(soundfile.write, samplerate=RATE_HZ)

# Night sounds. Each class is a tone, noise or pulses, in calls. Each number is drawn for a clip from a range: frequency
# [Hz], by what factor that changes during a call, pulses per second, length of a call and of the pause after it [s].
NIGHT = {
    "bat": ("tone", (3500, 7000), (0.3, 0.6), (1, 1), (0.01, 0.05), (0.03, 0.3)),
    "cricket": ("pulses", (2500, 4500), (1, 1), (22, 45), (0.06, 0.3), (0.1, 0.5)),
    "frog": ("pulses", (700, 3000), (0.9, 1.1), (20, 60), (0.15, 0.6), (0.1, 0.8)),
    "owl": ("tone", (300, 900), (0.8, 1.1), (1, 1), (0.15, 0.6), (0.1, 0.9)),
    "rain": ("noise", (1000, 4000), (1, 1), (1, 1), (0.5, 4), (0, 0.3)),
    "wind": ("noise", (200, 1500), (1, 1), (1, 1), (0.5, 4), (0, 0.5)),
}
SAMPLES = 64_000  # of a clip

# Utterances. F1 to F3 of eight vowels as men speak them (after Peterson and Barney 1952) [8, 3], and where the energy
# of the noise before a vowel lies.
VOWELS_HZ = np.array(
    [
        (270, 390, 530, 660, 730, 570, 440, 300),
        (2290, 1990, 1840, 1720, 1090, 840, 1020, 870),
        (3010, 2550, 2480, 2410, 2440, 2410, 2240, 2240),
    ]
).T
BURSTS_HZ = (5500, 3000, 1400, 4200, 2000, 700)


def night_sounds(clips: int = 1152) -> Path:
    """Return a folder of class-named subfolders with recordings: two thirds to train on, the others to test on."""
    paths = in_classes(clips, tuple(NIGHT), formats=("wav", "flac", "wav", "ogg"))
    return complete(f"night_sounds/{clips}_clips_4s_16000hz_seed0_v3", paths, night_sound, save=save)


def utterances(clips: int = 640) -> Path:
    """Return a folder with recordings of utterances: three quarters to train on, the others to test on."""
    formats = ("wav",) * 4 + ("flac",) * 4
    paths = in_classes(clips, ("all",), sides=("train", "train", "train", "test"), formats=formats)
    return complete(f"utterances/{clips}_clips_seed0_v3", paths, utterance, save=save)


def night_sound(index: int) -> NDArray[np.float32]:
    """Return night sound `index`, [T] within -1..1: a call of its class over that of another one, and noise."""
    rng = np.random.default_rng([0, index])
    names = tuple(NIGHT)
    name = names[index % len(names)]
    other_name = names[(index + rng.integers(1, len(names))) % len(names)]
    noise = lfilter([1.0], [1.0, -rng.uniform(0, 0.95)], rng.standard_normal(SAMPLES))
    call = calls(rng, name)
    other_gain = gain(rng.uniform(-12.0, 0.0))
    other_call = calls(rng, other_name)
    noise_gain = gain(-rng.uniform(-8.0, 8.0))
    return recorded(rng, call + other_gain * other_call + noise_gain * unit(noise))


def calls(rng: Generator, name: str) -> NDArray:
    """Return the sound of a class [SAMPLES], of unit power."""
    primitive, *ranges = NIGHT[name]
    hz, bend, pulse_hz, call_s, pause_s = (rng.uniform(low, high) for low, high in ranges)
    time_s = np.arange(SAMPLES) / RATE_HZ + rng.uniform(0, 4)
    through = np.minimum(time_s % (call_s + pause_s) / call_s, 1)  # 0..1 during a call, 1 in the pause
    loudness = np.sqrt(np.maximum(np.sin(np.pi * through), 0))
    if primitive == "noise":
        band = butter(1, (hz / 2, min(2 * hz, 0.49 * RATE_HZ)), "bandpass", fs=RATE_HZ, output="sos")
        return unit(loudness * sosfilt(band, rng.standard_normal(SAMPLES)))
    turns = np.cumsum(hz * bend**through)
    tone = np.sin(2 * np.pi * turns / RATE_HZ)
    if primitive == "pulses":
        loudness = loudness * np.exp(-4 * (time_s * pulse_hz % 1))
    return unit(loudness * tone)


def gain(decibel: float) -> float:
    """Return the factor of amplitude that so many decibels are."""
    return 10 ** (decibel / 20)


def unit(signal: NDArray) -> NDArray:
    """Return the signal at unit power."""
    return signal / (np.sqrt(np.mean(np.square(signal))) + 1e-9)


def recorded(rng: Generator, signal: NDArray) -> NDArray[np.float32]:
    """Return the signal as far from full scale as the microphone was turned up."""
    level = gain(rng.uniform(-18, -1))
    return (signal * (level / np.abs(signal).max())).astype(np.float32)


def utterance(index: int) -> NDArray[np.float32]:
    """Return utterance `index`, [T] within -1..1, by a speaker of its own; its length is log-normal."""
    rng = np.random.default_rng([0, index])
    duration_s = np.clip(2.2 * np.exp(0.6 * rng.standard_normal()), 0.5, 12.0)
    length = int(RATE_HZ * duration_s)
    throat = rng.uniform(0.95, 1.25)  # a shorter throat has higher formants and, as a rule, a higher voice
    pitch_hz = 115 * throat**3 * rng.uniform(0.85, 1.2)
    speech = np.zeros(0)
    while len(speech) < length:
        speech = np.append(speech, syllable(rng, throat, pitch_hz))
    noise_gain = gain(-rng.uniform(15, 35))
    return recorded(rng, speech[:length] + noise_gain * rng.standard_normal(length))


def syllable(rng: Generator, throat: float, pitch_hz: float) -> NDArray:
    """Return a pause, a burst and a vowel [T]. Seven times in ten the burst tells the vowel: there is that to learn."""
    burst = rng.integers(len(BURSTS_HZ))
    vowel = burst
    if rng.random() >= 0.7:
        vowel = rng.integers(len(VOWELS_HZ))
    pause = int(RATE_HZ * rng.uniform(0.0, 0.1))
    short = int(RATE_HZ * rng.uniform(0.03, 0.15))
    long = int(RATE_HZ * rng.uniform(0.1, 0.3))
    noise = resonate(rng.standard_normal(short), throat * BURSTS_HZ[burst], 800)
    falling = np.linspace(1.1, 0.9, long)
    turns = np.cumsum(falling) * pitch_hz * rng.uniform(0.9, 1.1) / RATE_HZ
    voice = np.diff(np.floor(turns), prepend=0.0)  # a pulse each time the vocal folds close
    for hz, width_hz in zip(VOWELS_HZ[vowel], (60, 90, 130), strict=True):
        voice = resonate(voice, throat * hz, width_hz)
    noise = 0.3 * noise / noise.std() * np.hanning(short)
    voice = voice / voice.std() * np.hanning(long) ** 0.3
    return np.concatenate([np.zeros(pause), noise, voice])


def resonate(signal: NDArray, hz: float, width_hz: float) -> NDArray:
    """Return the signal [T] through a resonance of gain 1 at 0 Hz (Klatt 1980)."""
    radius = np.exp(-np.pi * width_hz / RATE_HZ)
    a = [1.0, -2 * radius * np.cos(2 * np.pi * hz / RATE_HZ), radius**2]
    return lfilter([sum(a)], a, signal)
