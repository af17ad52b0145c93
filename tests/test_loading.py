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


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Noise of two classes in WAV files, a few of them at another sample rate."""
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    for name in ("owl", "frog"):
        (folder / name).mkdir()
        for number in range(12):
            rate_hz = 16000 if number % 3 else 22050
            soundfile.write(folder / name / f"{number}.wav", 0.1 * rng.standard_normal(rate_hz // 2), rate_hz)
    return folder


def test_the_parts_of_a_batch_add_up_to_it():
    found = examine(points(), device="cpu")
    parts = {row["part"]: row for row in found}
    assert list(parts) == ["read", "decode", "features", "collate", "copy"]
    assert sum(row["share"] for row in found) == pytest.approx(1, rel=0.01)


def test_recordings_are_read_and_decoded(recordings):
    found = examine(load_workload("audio", data_dir=str(recordings), size="tiny"), Recipe(batch_size=8), "cpu")
    took_s = {row["part"]: row["sample_s"] for row in found}
    assert min(took_s["read"], took_s["decode"]) > 0


def unreadable(item):
    raise BadItem(item.path, "it is not audio")


def all_but_the_first(item):
    return unreadable(item) if item.path == "0" else load(item, 8)


def test_unreadable_items_are_passed_over():
    assert examine(dataclasses.replace(points(), load=all_but_the_first), device="cpu")
    with pytest.raises(SpeedkitError, match="no readable item"):
        examine(dataclasses.replace(points(), load=unreadable), device="cpu")
