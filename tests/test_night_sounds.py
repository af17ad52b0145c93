"""The generated recordings: a function of seed and index, real files, whole sets, resumed and never mixed."""

import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import soundfile

from speedkit.data.sources import find_items
from speedkit.errors import UsageError
from speedkit.workloads.generated import TEST_PATTERN, in_classes
from speedkit.workloads.night_sounds import CLASSES, FORMATS, SAMPLES, clip, generate

HEARD = [
    0.0125,
    0.0251,
    0.0208,
    0.0749,
    0.0878,
    0.0625,
    0.0194,
    0.0339,
    0.0477,
    0.0798,
]  # mean absolute samples of clips 0 to 9 of seed 0


PATHS = [in_classes(index, CLASSES, FORMATS) for index in range(120)]


def samples(folder) -> dict[str, np.ndarray]:
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".wav", ".flac", ".ogg")]
    return {str(path.relative_to(folder)): soundfile.read(path)[0] for path in files}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_the_clips_are_those_that_published_figures_were_measured_on():
    heard = [round(float(np.abs(clip(index)).mean()), 4) for index in range(len(CLASSES))]
    assert heard == pytest.approx(HEARD, abs=2e-4), "another sound: raise night_sounds.VERSION and publish anew"


def test_every_class_sounds_and_the_set_is_balanced_over_classes_sides_and_formats():
    for index, name in enumerate(CLASSES):
        wave = clip(index)
        assert wave.dtype == np.float32 and wave.shape == (SAMPLES,)
        assert np.isfinite(wave).all() and 0.1 < np.abs(wave).max() < 0.9
        mine = [path for path in PATHS if path.startswith(f"{name}/")]
        assert len(mine) == 12 and sum("_test." in path for path in mine) == 4
        assert Counter(path.rpartition(".")[2] for path in mine) == {"wav": 6, "flac": 3, "ogg": 3}


def test_files_on_disk_hold_the_clips(tmp_path):
    folder = generate(tmp_path, clips=40)
    for index in (0, 13, 39):
        wave, rate_hz = soundfile.read(folder / PATHS[index], dtype="float32")
        tolerance = 0.2 if PATHS[index].endswith(".ogg") else 1e-4
        assert rate_hz == 16000 and np.abs(wave - clip(index)).max() < tolerance
    found = find_items(folder, test_pattern=TEST_PATTERN)
    assert found.classes == CLASSES and len(found.train) == 30 and len(found.test) == 10


def test_a_larger_set_begins_with_the_smaller(tmp_path):
    small, large = generate(tmp_path, clips=20), generate(tmp_path, clips=30)
    assert small != large != generate(tmp_path, clips=1, seed=1)
    first, both = samples(small), samples(large)
    assert len(first) == 20 and len(both) == 30 and same(first, {key: both[key] for key in first})


def test_whole_set_is_reused_and_what_is_missing_is_made(tmp_path):
    folder = generate(tmp_path, clips=20)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert len(kept) == 20
    removed = folder / PATHS[3]
    before = soundfile.read(removed)[0]
    removed.unlink()
    assert generate(tmp_path, clips=20) == folder
    assert np.array_equal(soundfile.read(removed)[0], before)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items() if path != removed)


def test_an_interruption_ends_it_at_once_and_leaves_whole_files_only(tmp_path):
    # A shell's background job ignores Ctrl-C, and hands that on.
    code = """import signal, sys; from speedkit.workloads.night_sounds import generate
signal.signal(signal.SIGINT, signal.default_int_handler)
generate(sys.argv[1], clips=2000)"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL)
    while not list(tmp_path.rglob("*.wav")) and process.poll() is None:
        time.sleep(0.01)  # until there is something to interrupt
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    (folder,) = tmp_path.iterdir()
    assert 0 < len(samples(folder)) < 1000
    assert not list(folder.rglob("*.tmp")), "a file that was begun is finished or removed"


def test_default_folder_is_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))
    assert generate(clips=1).parent == tmp_path / "cache" / "night_sounds"


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written to .*SPEEDKIT_CACHE_DIR"):
        generate(tmp_path / "file", clips=1)
