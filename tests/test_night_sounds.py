"""The generated recordings: a function of seed and index, real files, whole sets, resumed and never mixed."""

import json
import threading

import numpy as np
import pytest
import soundfile

from speedkit.data.sources import find_items
from speedkit.errors import UsageError
from speedkit.workloads.night_sounds import CLASSES, TEST_PATTERN, clip, clip_path, generate


def samples(folder) -> dict[str, np.ndarray]:
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".wav", ".flac", ".ogg")]
    return {str(path.relative_to(folder)): soundfile.read(path)[0] for path in files}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_clip_is_a_function_of_seed_and_index():
    assert np.array_equal(clip(7, seed=1), clip(7, seed=1))
    assert not np.array_equal(clip(7, seed=1), clip(7, seed=2))
    assert not np.array_equal(clip(7), clip(17))  # another take of the same class


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


def test_threads_and_one_thread_make_the_same_samples(tmp_path):
    seen = []
    several = generate(
        tmp_path / "a", clips=40, duration_s=0.5, threads=2, progress=lambda done, total: seen.append((done, total))
    )
    one = generate(tmp_path / "b", clips=40, duration_s=0.5, threads=1)
    assert seen == [(done, 40) for done in range(1, 41)]
    assert several.name == one.name and same(samples(several), samples(one))


def test_whole_set_is_reused_and_an_interrupted_one_completed(tmp_path):
    def stop(done, total):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, clips=20, duration_s=0.5, threads=1, progress=stop)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "night_sounds.json").exists() and len(samples(folder)) == 7
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    made = []
    assert generate(tmp_path, clips=20, duration_s=0.5, progress=lambda done, total: made.append(total)) == folder
    assert made == [13] * 13 and all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert json.loads((folder / "night_sounds.json").read_text())["clips"] == 20
    generate(tmp_path, clips=20, duration_s=0.5, progress=lambda done, total: pytest.fail("made again"))
    clip_path(folder, 3).unlink()  # somebody tidied up
    generate(tmp_path, clips=20, duration_s=0.5)
    assert len(samples(folder)) == 20


def test_interrupting_several_threads_ends_them_and_leaves_whole_files(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, clips=40, duration_s=0.5, threads=2, progress=stop)
    (folder,) = tmp_path.iterdir()
    assert 0 < len(samples(folder)) <= 40
    assert not [path for path in folder.rglob(".*") if path.stat().st_size == 0]
    assert threading.active_count() == before  # no thread of ours is left


def test_other_parameters_make_another_folder(tmp_path):
    choices = ((0, 8000), (1, 8000), (0, 16000))
    folders = [generate(tmp_path, clips=2, duration_s=0.5, seed=seed, sample_rate_hz=rate) for seed, rate in choices]
    assert len(set(folders)) == 3


def test_default_folder_is_the_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))
    assert generate(clips=1, duration_s=0.5).parent == tmp_path / "cache" / "night_sounds"


def test_impossible_requests_and_unwritable_folders_are_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"at least 1 clip, 0\.5 s and 8000 Hz, not 0 clips"):
        generate(tmp_path, clips=0)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written to .*SPEEDKIT_CACHE_DIR"):
        generate(tmp_path / "file", clips=1)
