"""The module of lesson 10: where the time of a batch goes, in parts that add up."""

import pytest

from speedkit.lab.workloads import load_workload
from speedkit.lessons.loading import examine
from speedkit.recipe import Recipe


def test_recordings_are_read_and_decoded_and_the_parts_add_up(recordings):
    rows = examine(load_workload("audio", data_dir=recordings, size="tiny"), Recipe(batch_size=8))
    assert [row["part"] for row in rows] == ["read", "decode", "features", "collate", "copy"]
    assert min(row["sample_ms"] for row in rows[:4]) > 0
    assert sum(row["share"] for row in rows) == pytest.approx(1)
