"""The module of lesson 10: where the time of a batch goes, in parts that add up."""

import numpy as np
import pytest
import soundfile

from speedkit.lab.workloads import load_workload
from speedkit.lessons.loading import examine
from speedkit.recipe import Recipe


def test_recordings_are_read_and_decoded_and_the_parts_add_up(tmp_path):
    for name in ("owl", "frog"):
        (tmp_path / name).mkdir()
        for number in range(12):
            noise = 0.1 * np.random.default_rng(number).standard_normal(11025)
            soundfile.write(tmp_path / name / f"{number}.wav", noise, 22050)
    rows = examine(load_workload("audio", data_dir=str(tmp_path), size="tiny"), Recipe(batch_size=8))
    assert [row["part"] for row in rows] == ["read", "decode", "features", "collate", "copy"]
    assert min(row["sample_s"] for row in rows[:4]) > 0
    assert sum(row["share"] for row in rows) == pytest.approx(1)
