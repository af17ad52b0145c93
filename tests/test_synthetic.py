"""The generated sets: functions of an index, real files, whole sets, resumed and never mixed."""

import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import soundfile
from PIL import Image

from speedkit.data.sources import find_items
from speedkit.workloads import night_sounds, patterns, utterances
from speedkit.workloads.generated import TEST_PATTERN, in_classes

# By set: an item, and the file that it is in.
SETS = {
    night_sounds: (night_sounds.clip, lambda index: in_classes(index, night_sounds.CLASSES, night_sounds.FORMATS)),
    patterns: (patterns.photograph, lambda index: in_classes(index, patterns.CLASSES, patterns.FORMATS)),
    utterances: (utterances.clip, utterances.file_name),
}


@pytest.fixture(params=SETS, ids=lambda module: module.__name__.rpartition(".")[2])
def module(request, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    return request.param


def files_of(folder):
    return sorted(path for path in folder.rglob("*.*") if path.is_file())


def read(path):
    if path.suffix in (".jpg", ".png"):
        return np.asarray(Image.open(path), float)
    return soundfile.read(path, dtype="float32")[0]


def test_files_hold_the_items_and_a_larger_set_begins_with_the_smaller(module, tmp_path):
    small, large = module.generate(40), module.generate(48)
    assert small.is_relative_to(tmp_path) and small != large and len(files_of(large)) == 48
    assert all(np.array_equal(read(path), read(large / path.relative_to(small))) for path in files_of(small))
    assert {path.suffix[1:] for path in files_of(small)} == set(module.FORMATS)
    kind = "image" if module is patterns else "audio"
    split = find_items(small, test_pattern=TEST_PATTERN, kind=kind, labelled=module is not utterances)
    assert len(split.train) + len(split.test) == 40 and len(split.test) >= 8
    make, path_of = SETS[module]
    for index in (0, 13, 30, 39):
        path, item = small / path_of(index), make(index).astype(float)
        if path.suffix in (".jpg", ".ogg"):  # which keep what is seen and heard
            assert np.corrcoef(read(path).ravel(), item.ravel())[0, 1] > 0.8
        else:
            assert np.abs(read(path) - item).max() < 1e-4


def test_night_sounds_are_balanced_over_classes_and_sound():
    files = [SETS[night_sounds][1](index).split("/") for index in range(12 * len(night_sounds.CLASSES))]
    assert set(Counter(name for name, _ in files).values()) == {12}
    assert set(Counter(name for name, file in files if "_test." in file).values()) == {4}
    for index in range(len(night_sounds.CLASSES)):
        wave = night_sounds.clip(index)
        assert wave.dtype == np.float32 and wave.shape == (night_sounds.SAMPLES,) and 0.1 < np.abs(wave).max() < 0.9


def test_lengths_of_utterances_are_log_normal():
    lengths_s = np.array([len(utterances.clip(index)) / utterances.RATE_HZ for index in range(60)])
    assert 0.5 <= lengths_s.min() < 1 < 4 < lengths_s.max() <= 12
    assert np.log(lengths_s).std() == pytest.approx(0.6, abs=0.15)


def test_whole_set_is_reused_and_what_is_missing_is_made(module):
    folder = module.generate(20)
    removed, *others = files_of(folder)
    before, content = {path: path.stat().st_mtime_ns for path in others}, read(removed)
    removed.unlink()
    assert module.generate(20) == folder and np.array_equal(read(removed), content)
    assert {path: path.stat().st_mtime_ns for path in others} == before


def test_an_interruption_ends_it_at_once_and_leaves_whole_files_only(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    # A shell's background job ignores Ctrl-C, and hands that on.
    code = """import signal; from speedkit.workloads.night_sounds import generate
signal.signal(signal.SIGINT, signal.default_int_handler)
generate(2000)"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not list(tmp_path.rglob("*.wav")) and process.poll() is None:
        time.sleep(0.01)  # until there is something to interrupt
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    left = files_of(tmp_path)
    assert 0 < len(left) < 1000 and all(len(read(path)) == night_sounds.SAMPLES for path in left)
