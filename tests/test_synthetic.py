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
from speedkit.errors import UsageError
from speedkit.workloads import night_sounds, patterns, utterances
from speedkit.workloads.generated import TEST_PATTERN, in_classes

# By set: an item, the file that it is in, and the mean magnitude of items 0, 1, ....
SETS = {
    night_sounds: (
        night_sounds.clip,
        lambda index: in_classes(index, night_sounds.CLASSES, night_sounds.FORMATS),
        [0.0125, 0.0251, 0.0208, 0.0749, 0.0878, 0.0625, 0.0194, 0.0339, 0.0477, 0.0798],
    ),
    patterns: (
        patterns.photograph,
        lambda index: in_classes(index, patterns.CLASSES, patterns.FORMATS),
        [110.3, 151.5, 179.4, 151.8, 147.1, 105.2, 180.3, 132.5, 126.7, 129.4],
    ),
    utterances: (utterances.clip, utterances.file_name, [0.0439, 0.0495, 0.0645, 0.0382, 0.0298, 0.0256]),
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


def test_items_are_those_that_published_figures_were_measured_on(module):
    make, _, expected = SETS[module]
    seen = [float(np.abs(make(index).astype(float)).mean()) for index in range(len(expected))]
    assert seen == pytest.approx(expected, rel=0.01), "another set: raise its VERSION and publish anew"


def test_files_hold_the_items_and_a_larger_set_begins_with_the_smaller(module, tmp_path):
    small, large = module.generate(40), module.generate(48)
    assert small.is_relative_to(tmp_path) and small != large and len(files_of(large)) == 48
    assert all(np.array_equal(read(path), read(large / path.relative_to(small))) for path in files_of(small))
    found = find_items(
        small, test_pattern=TEST_PATTERN, kind="image" if module is patterns else "audio", labelled=False
    )
    assert len(found.train) == 30 and len(found.test) == 10
    assert {path.suffix[1:] for path in files_of(small)} == set(module.FORMATS)
    make, path_of, _ = SETS[module]
    for index in (0, 13, 30, 39):
        path, made = small / path_of(index), make(index).astype(float)
        if path.suffix in (".jpg", ".ogg"):  # which keep what is seen and heard
            assert np.corrcoef(read(path).ravel(), made.ravel())[0, 1] > 0.8
        else:
            assert np.abs(read(path) - made).max() < 1e-4


def test_night_sounds_are_balanced_over_classes_and_sound():
    for index, name in enumerate(night_sounds.CLASSES):
        wave = night_sounds.clip(index)
        assert wave.dtype == np.float32 and wave.shape == (night_sounds.SAMPLES,)
        assert np.isfinite(wave).all() and 0.1 < np.abs(wave).max() < 0.9
        mine = [path for path in map(SETS[night_sounds][1], range(120)) if path.startswith(f"{name}/")]
        assert len(mine) == 12 and sum("_test." in path for path in mine) == 4
        assert Counter(path.rpartition(".")[2] for path in mine) == {"wav": 6, "flac": 3, "ogg": 3}


def test_lengths_of_utterances_are_log_normal():
    lengths_s = np.array([len(utterances.clip(index)) / utterances.RATE_HZ for index in range(60)])
    assert 0.5 <= lengths_s.min() < 1 < 4 < lengths_s.max() <= 12
    assert np.log(lengths_s).std() == pytest.approx(0.6, abs=0.15)


def test_whole_set_is_reused_and_what_is_missing_is_made(module):
    folder = module.generate(20)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files_of(folder)}
    removed = files_of(folder)[3]
    removed.unlink()
    assert module.generate(20) == folder and removed.read_bytes() == before[removed][1]
    assert all(path.stat().st_mtime_ns == when for path, (when, _) in before.items() if path != removed)


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


def test_an_unwritable_folder_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot be written to .*SPEEDKIT_CACHE_DIR"):
        night_sounds.generate(1)
