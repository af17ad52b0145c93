"""The generated recordings: a function of seed and index, real files, whole sets, resumed and never mixed."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile

from speedkit.data.sources import find_items
from speedkit.errors import UsageError
from speedkit.workloads.generated import TEST_PATTERN
from speedkit.workloads.night_sounds import CLASSES, clip, clip_path, generate

# Mean absolute samples of clips 0 to 9 of seed 0, half a second long.
HEARD = [0.0593, 0.0371, 0.0254, 0.047, 0.0246, 0.1187, 0.0796, 0.0921, 0.0875, 0.0221]


def samples(folder) -> dict[str, np.ndarray]:
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".wav", ".flac", ".ogg")]
    return {str(path.relative_to(folder)): soundfile.read(path)[0] for path in files}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_clip_is_a_function_of_seed_and_index():
    assert np.array_equal(clip(7, seed=1), clip(7, seed=1))
    assert not np.array_equal(clip(7, seed=1), clip(7, seed=2))
    assert not np.array_equal(clip(7), clip(17))  # another take of the same class


def test_the_clips_are_those_that_published_figures_were_measured_on():
    heard = [round(float(np.abs(clip(index, 0, 0.5)).mean()), 4) for index in range(len(CLASSES))]
    assert heard == pytest.approx(HEARD, abs=2e-4), "another sound: raise night_sounds._VERSION and publish anew"


@pytest.mark.parametrize("index", range(len(CLASSES)))
@pytest.mark.parametrize("sample_rate_hz", [8000, 16000, 44100])
def test_every_class_sounds_at_any_rate(index, sample_rate_hz):
    wave = clip(index, 0, 1.0, sample_rate_hz)
    assert wave.dtype == np.float32 and wave.shape == (sample_rate_hz,)
    assert np.isfinite(wave).all() and 0.1 < np.abs(wave).max() < 0.9


def test_the_set_is_balanced_over_classes_sides_and_formats(tmp_path):
    paths = [clip_path(tmp_path, index) for index in range(120)]
    for name in CLASSES:
        mine = [path for path in paths if path.parent.name == name]
        assert len(mine) == 12 and sum("_test." in path.name for path in mine) == 4
        assert sorted(path.suffix for path in mine) == [".flac"] * 3 + [".ogg"] * 3 + [".wav"] * 6
        assert len({path.suffix for path in mine if "_test." in path.name}) == 3


def test_files_on_disk_hold_the_clips(tmp_path):
    folder = generate(tmp_path, clips=40, duration_s=0.5)
    for index in (0, 13, 39):
        wave, rate_hz = soundfile.read(clip_path(folder, index), dtype="float32")
        tolerance = 0.2 if clip_path(folder, index).suffix == ".ogg" else 1e-4
        assert rate_hz == 16000 and np.abs(wave - clip(index, 0, 0.5)).max() < tolerance
    found = find_items(folder, test_pattern=TEST_PATTERN)
    assert found.classes == CLASSES and len(found.train) == 30 and len(found.test) == 10


def test_a_larger_set_begins_with_the_smaller(tmp_path):
    small, large = generate(tmp_path, clips=20, duration_s=0.5), generate(tmp_path, clips=30, duration_s=0.5)
    assert small != large
    first, both = samples(small), samples(large)
    assert len(first) == 20 and len(both) == 30 and same(first, {key: both[key] for key in first})


def test_whole_set_is_reused_and_what_is_missing_is_made(tmp_path):
    folder = generate(tmp_path, clips=20, duration_s=0.5)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert len(kept) == 20
    removed = clip_path(folder, 3)
    before = soundfile.read(removed)[0]
    removed.unlink()
    assert generate(tmp_path, clips=20, duration_s=0.5) == folder
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


def test_other_parameters_make_another_folder(tmp_path):
    choices = ((0, 8000), (1, 8000), (0, 16000))
    folders = [generate(tmp_path, clips=2, duration_s=0.5, seed=seed, sample_rate_hz=rate) for seed, rate in choices]
    assert len(set(folders)) == 3


def test_default_folder_is_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))
    assert generate(clips=1, duration_s=0.5).parent == tmp_path / "cache" / "night_sounds"


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written to .*SPEEDKIT_CACHE_DIR"):
        generate(tmp_path / "file", clips=1)
