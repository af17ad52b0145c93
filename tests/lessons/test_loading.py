"""The module of lessons 10 and 11: the parts of a batch add up, epochs take turns, and files are what was asked for."""

import pytest
import torch
from torch.utils.data import DataLoader

from speedkit.lab.workloads import load_workload
from speedkit.lessons.loading import epochs_in_turns, examine, in_formats, short_clips
from speedkit.lessons.planted import busy
from speedkit.recipe import Recipe


def test_recordings_are_read_and_decoded_and_the_parts_add_up(recordings):
    rows = examine(load_workload("audio", data_dir=recordings, size="tiny"), Recipe(batch_size=8))
    assert [row["part"] for row in rows] == ["read", "decode", "features", "collate", "copy"]
    assert min(row["sample_ms"] for row in rows[:4]) > 0
    assert sum(row["share"] for row in rows) == pytest.approx(1)


class Slow(list):
    """Items that take 2 ms each to make."""

    def __getitem__(self, index):
        busy(0.002)
        return super().__getitem__(index)


def test_epochs_of_loaders_take_turns_and_the_quicker_one_is_named_faster():
    seen, threads = [], torch.get_num_threads()
    sides = {"0": (DataLoader(Slow(range(8)), 4), 1), "in memory": (DataLoader([*range(8)], 4), threads)}
    none, other = epochs_in_turns(lambda batch: seen.append(torch.get_num_threads()), sides, 4, kind="x, ")
    assert len(seen) == 5 * 2 * 2 and {*seen} == {1, threads} and torch.get_num_threads() == threads
    assert none["ratio"] == 1 and none["decision"] == "undecided" and none["step_s"] > 4 * 0.002
    assert (other["name"], other["a"], other["decision"]) == ("x, workers=in memory", "x, no workers", "faster")
    assert len(other["seconds_a"]) == len(other["seconds_b"]) == 4 and other["step_s"] < none["step_s"]


def test_sounds_are_written_in_four_formats_and_short_clips_by_class(recordings, tmp_path):
    items = load_workload("audio", data_dir=recordings, size="tiny").train[:3]
    paths = in_formats(items, tmp_path)
    assert [*paths] == ["WAV", "FLAC", "OGG", "MP3", "JPEG"]
    assert all(len(written) == 3 and path.stat().st_size for written in paths.values() for path in written)
    clips = short_clips(items, tmp_path / "data", 5)
    assert len(clips) == 5 and clips == sorted(clips)
