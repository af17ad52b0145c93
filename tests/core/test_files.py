"""Files are whole or absent, JSON holds no NaN, and one folder holds one run."""

import json
import math

import pytest
from processes import python

from speedkit.errors import UsageError
from speedkit.files import atomic, claim_folder, read_json, write_json

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
        with pytest.raises(UsageError, match="already holds a train run: name another with --out"):
            claim_folder(folder, kind, resume=resume)
