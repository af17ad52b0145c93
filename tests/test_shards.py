"""Tar shards: the same training as from single files, and complete or absent whatever interrupts their writing."""

import dataclasses
import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tiny
import torch
import webdataset

import speedkit
from speedkit.data import shards
from speedkit.data.decode import BadItem, load_audio
from speedkit.data.shards import members, pack
from speedkit.errors import PlanError

RATE_HZ = 8000
SHARD_BYTES = 16_000  # a few clips


@pytest.fixture
def workload(tmp_path, monkeypatch):
    """The audio workload on two classes of clips in three formats, for small shards."""
    monkeypatch.setattr(shards, "SHARD_BYTES", SHARD_BYTES)
    rng = np.random.default_rng(0)
    for index in range(40):
        path = tmp_path / "data" / ("low", "high")[index % 2] / f"clip {index // 2}.{('wav', 'flac', 'ogg')[index % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, rng.uniform(-0.5, 0.5, 2400), RATE_HZ)
    return speedkit.load_workload("audio", data_dir=tmp_path / "data", size="tiny")


def packed(workload, folder):
    return pack(workload, workload.train, folder)


def contents(folder):
    """The bytes of every tar below `folder`, and when it was written."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(folder).rglob("*.tar")}


def test_a_shard_holds_the_bytes_of_the_files_in_their_order_and_is_used_again(workload, tmp_path):
    items = packed(workload, tmp_path / "shards")
    tars = sorted({item.path.tar for item in items})
    assert len(tars) > 3
    assert [item.path.read() for item in items] == [Path(item.path).read_bytes() for item in workload.train]
    assert [item.label for item in items] == [item.label for item in workload.train]
    others = []
    for sample in webdataset.WebDataset(tars, shardshuffle=False):
        (data,) = (value for key, value in sample.items() if not key.startswith("__") and key != "cls")
        others.append((data, int(sample["cls"])))
    assert others == [(item.path.read(), item.label) for item in items]

    written = contents(tmp_path / "shards")
    assert packed(workload, tmp_path / "shards") == items and contents(tmp_path / "shards") == written
    soundfile.write(workload.train[0].path, np.zeros(2400), RATE_HZ)
    changed = packed(workload, tmp_path / "shards")
    assert torch.equal(workload.load(changed[0]), workload.load(workload.train[0]))


def test_what_cannot_be_read_is_a_bad_item_that_is_named(workload, tmp_path):
    Path(workload.train[5].path).write_bytes(b"not audio")
    items = packed(workload, tmp_path / "shards")
    with pytest.raises(BadItem, match="cannot be decoded") as caught:
        workload.load(items[5])
    assert Path(workload.train[5].path).stem.replace(" ", "_") in caught.value.path
    short = dataclasses.replace(items[0].path, size=10**6)
    with pytest.raises(BadItem, match="of 1000000 bytes are there"):
        load_audio(short, RATE_HZ, 100)
    Path(items[-1].path.tar).unlink()
    with pytest.raises(BadItem, match="No such file"):
        workload.load(items[-1])
    points = tiny.points()
    with pytest.raises(PlanError, match="shards=True packs files, and there is no file 0"):
        pack(points, points.train, tmp_path)


def test_what_a_killed_run_leaves_does_not_count_and_two_writers_at_once_write_once(workload, tmp_path):
    folder = Path(packed(workload, tmp_path / "shards")[0].path.tar).parent
    written = {name: data for name, (data, _) in contents(folder).items()}
    unfinished = folder.rename(folder.with_suffix(".tmp"))  # renaming it is the last that a run does
    min(unfinished.glob("*.tar")).write_bytes(b"")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(packed, [workload] * 2, [tmp_path / "shards"] * 2)
    assert first == second and not unfinished.exists()
    assert {name: data for name, (data, _) in contents(folder).items()} == written


def test_members_of_a_foreign_tar_are_read_at_random_and_nothing_is_extracted(tmp_path):
    with tarfile.open(tmp_path / "foreign.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for index, name in enumerate(["ü" * 80, "../outside.wav"]):  # a long name takes further headers
            info = tarfile.TarInfo(name)
            info.size = 1000 + index
            tar.addfile(info, io.BytesIO(bytes([index]) * info.size))
        link = tarfile.TarInfo("link.wav")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert [member.read() for member in members(tmp_path / "foreign.tar")] == [b"\0" * 1000, b"\1" * 1001]
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.tar"]
