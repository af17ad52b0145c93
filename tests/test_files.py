"""Files are whole or absent, JSON holds no NaN, and one folder holds one run."""

import json
import math
import os
import subprocess
import sys

import pytest

from speedkit.errors import UsageError
from speedkit.files import atomic, claim_folder, read_json, write_json, write_text


def test_atomic_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    with atomic(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        assert temporary.parent == tmp_path, "a rename is atomic only within one file system"
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_exception_keeps_the_file_that_was_there(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_text("new, half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_kill_while_writing_leaves_no_file_of_that_name(tmp_path):
    path = tmp_path / "a.txt"
    code = (
        "import os, signal, sys\nfrom speedkit.files import atomic\n"
        "with atomic(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -9
    assert not path.exists()
    write_text(path, "whole")
    assert path.read_text() == "whole"


def test_json_comes_back_and_has_no_nan(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"loss": [1.5, math.nan, math.inf, -math.inf], "pair": (1, 2), "name": "Ω", "on": True, 3: None})
    assert read_json(path) == {"loss": [1.5, None, None, None], "pair": [1, 2], "name": "Ω", "on": True, "3": None}
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    json.loads(path.read_text(), parse_constant=pytest.fail)


def test_value_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert read_json(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_claim_refuses_another_run_and_says_what_to_do(tmp_path):
    folder = claim_folder(tmp_path / "run", "train")
    with pytest.raises(UsageError, match=r"already holds a train run.*--resume.*--out") as refused:
        claim_folder(folder, "train")
    assert str(folder) in str(refused.value)
    assert refused.value.exit_code == 2
    with pytest.raises(UsageError, match=r"already holds a train run: name another with --out"):
        claim_folder(folder, "climb", resume=True)


def test_claim_resumes_a_run_of_its_own_kind(tmp_path):
    folder = claim_folder(tmp_path / "run", "train")
    write_json(folder / "history.json", {})
    assert claim_folder(folder, "train", resume=True) == folder
    assert (folder / "history.json").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_claim_refuses_somebody_s_own_files(tmp_path, resume):
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(UsageError, match=r"files that speedkit did not write: name another"):
        claim_folder(tmp_path, "train", resume=resume)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_claim_of_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path):
    # Below a regular file nobody can write, whoever runs the test.
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match=r"cannot be written \(.+\)") as refused:
            claim_folder(folder, "train")
        assert str(folder) in str(refused.value) and "\n" not in str(refused.value)
