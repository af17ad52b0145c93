"""The generated sets: functions of an index, real files, whole sets, resumed and never mixed."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile
from PIL import Image

from speedkit.lab.workloads.patterns import patterns, photograph
from speedkit.lab.workloads.sounds import SAMPLES, night_sound, night_sounds, utterance, utterances

# Each set, what makes an item of it, and in which formats.
SETS = {
    night_sounds: (night_sound, {"wav", "flac", "ogg"}),
    patterns: (photograph, {"jpg", "png"}),
    utterances: (utterance, {"wav", "flac"}),
}


def files_of(folder):
    return sorted(path for path in folder.rglob("*.*") if path.is_file())


def read(path):
    if path.suffix in (".jpg", ".png"):
        return np.asarray(Image.open(path), float)
    return soundfile.read(path, dtype="float32")[0]


@pytest.mark.parametrize("generate", SETS)
def test_files_hold_the_items_and_a_larger_set_begins_with_the_smaller(generate, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    small, large = generate(40), generate(48)
    assert small.is_relative_to(tmp_path) and small != large and len(files_of(large)) == 48
    assert all(np.array_equal(read(path), read(large / path.relative_to(small))) for path in files_of(small))
    make, formats = SETS[generate]
    assert {path.suffix[1:] for path in files_of(small)} == formats
    # Number `index` is a file of that number: of the whole set, or of its class.
    classes = sorted({path.parent for path in files_of(small)})
    for index in (0, 13, 30, 39):
        take, number = divmod(index, len(classes))
        (path,) = classes[number].glob(f"{take:05d}_*")
        if path.suffix in (".jpg", ".ogg"):  # which keep what is seen and heard
            assert np.corrcoef(read(path).ravel(), make(index).astype(float).ravel())[0, 1] > 0.8
        else:
            assert np.abs(read(path) - make(index)).max() < 1e-4

    # What is missing is made, the rest is left alone.
    removed, *others = files_of(small)
    before, content = {path: path.stat().st_mtime_ns for path in others}, read(removed)
    removed.unlink()
    assert generate(40) == small and np.array_equal(read(removed), content)
    assert {path: path.stat().st_mtime_ns for path in others} == before


@pytest.mark.slow
def test_an_interruption_ends_it_at_once_and_leaves_whole_files_only(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    # A shell's background job ignores Ctrl-C, and hands that on.
    code = """import signal; from speedkit.lab.workloads.sounds import night_sounds
signal.signal(signal.SIGINT, signal.default_int_handler)
night_sounds(2000)"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not list(tmp_path.rglob("*.wav")) and process.poll() is None:
        time.sleep(0.01)  # until there is something to interrupt
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    left = files_of(tmp_path)
    assert 0 < len(left) < 1000 and all(len(read(path)) == SAMPLES for path in left)
