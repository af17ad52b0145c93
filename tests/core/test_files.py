"""Files are whole or absent, JSON holds no NaN, and one folder holds one run."""

import json
import math
import shutil

import pytest
import torch
from processes import python

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, claim_folder, read_json, write_json
from speedkit.train.checkpoint_file import CheckpointWriter

KILLED_WHILE_WRITING = """
import os, signal, sys
from speedkit.files import atomic
with atomic(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    assert python("-c", KILLED_WHILE_WRITING, path).returncode == -9 and not path.exists()
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and not temporary.exists()


def test_json_comes_back_without_nan(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"loss": [1.5, math.nan, math.inf, -math.inf], "pair": (1, 2), "name": "Ω", 3: None})
    assert read_json(path) == {"loss": [1.5, None, None, None], "pair": [1, 2], "name": "Ω", "3": None}
    json.loads(path.read_text(), parse_constant=pytest.fail)


def test_one_folder_holds_one_run_which_its_own_kind_goes_on_with(tmp_path):
    folder = claim_folder(tmp_path / "run", "train")
    assert claim_folder(folder, "train", resume=True) == folder
    for kind, resume in (("train", False), ("tune", True)):
        with pytest.raises(UsageError, match="already holds a train run: name another by out="):
            claim_folder(folder, kind, resume=resume)


def test_an_empty_marker_and_half_a_checkpoint_of_a_killed_run_stop_nobody(tmp_path):
    (tmp_path / ".speedkit-run").touch()
    (tmp_path / "..speedkit-run.0a1b2c3d.tmp").touch()
    claim_folder(tmp_path, "train")
    (tmp_path / ".checkpoint.pt.0a1b2c3d.tmp").touch()
    claim_folder(tmp_path, "train", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [".speedkit-run"]


def test_what_cannot_be_written_is_said_with_its_path(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*a.txt'"), atomic(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        with open("/dev/full", "w") as full:
            full.write("x")


def test_a_checkpoint_that_does_not_fit_says_that_the_disk_is_full(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path / "gone", torch.device("cpu"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 100, 0))
    writer.save({"weight": torch.zeros(8)})
    with pytest.raises(SpeedkitError, match="gone: the disk is full"):
        writer.wait()
