"""Where the time of a batch goes: its parts add up, and files are read and decoded."""

import dataclasses

import numpy as np
import pytest
import soundfile
from tiny import load, points

from speedkit.data.decode import BadItem
from speedkit.errors import SpeedkitError
from speedkit.measure.loading import examine
from speedkit.recipe import Recipe
from speedkit.workloads import load_workload


def test_recordings_are_read_and_decoded_and_the_parts_add_up(tmp_path):
    for name in ("owl", "frog"):
        (tmp_path / name).mkdir()
        for number in range(12):
            noise = 0.1 * np.random.default_rng(number).standard_normal(11025)
            soundfile.write(tmp_path / name / f"{number}.wav", noise, 22050)
    rows = examine(load_workload("audio", data_dir=str(tmp_path), size="tiny"), Recipe(batch_size=8), "cpu")
    assert [row["part"] for row in rows] == ["read", "decode", "features", "collate", "copy"]
    assert min(row["sample_s"] for row in rows[:4]) > 0
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def unreadable(item):
    raise BadItem(item.path, "it is not audio")


def all_but_the_first(item):
    return unreadable(item) if item.path == "0" else load(item, 8)


def test_unreadable_items_are_passed_over():
    assert examine(dataclasses.replace(points(), load=all_but_the_first), device="cpu")
    with pytest.raises(SpeedkitError, match="no readable item"):
        examine(dataclasses.replace(points(), load=unreadable), device="cpu")
