"""The Makefile: values arrive as typed, a set-up is made once, CI runs everything once."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from processes import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments, folder=ROOT):
    """Run make as from a shell of its own: nothing of the make that may be running this test reaches it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, env=inherited)


@pytest.fixture
def tune(tmp_path):
    """Run `make tune` with a speedkit that prints its arguments, and return them."""
    speedkit = tmp_path / "speedkit"
    speedkit.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    speedkit.chmod(0o755)
    # The stamp of the set-up is a file that is there: whether this clone is set up does not matter here.
    options = ("-s", "tune", "STAMP=pyproject.toml", f"SPEEDKIT={speedkit}")
    return lambda *variables: json.loads(make(*options, *variables).stdout)


@pytest.mark.parametrize("value", [r"^(\d)_[0-4]\.wav$", "$HOME $(shell id) ${x", "a 'b' \"c\", `d`;#*"])
def test_make_hands_values_to_speedkit_as_typed(tune, value):
    names = ("OUT", "DATA", "LABELS", "LABEL_PATTERN", "TEST_PATTERN", "BUDGET")
    options = ("--out", "--data-dir", "--labels", "--label-pattern", "--test-pattern", "--budget")
    arguments = tune(*(f"{name}={value}" for name in names))
    assert arguments == ["tune", "audio", *(word for option in options for word in (option, value))]


def test_make_tuning_without_variables_writes_to_a_new_folder_of_runs(tune):
    _, workload, option, out, *others = tune("WORKLOAD=image", "ARGS=--size tiny --seed 3")
    assert (workload, option, others) == ("image", "--out", ["--size", "tiny", "--seed", "3"])
    assert re.fullmatch(r"runs/\d{8}-\d{6}", out)


def test_second_make_installs_nothing_and_a_new_lock_installs(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    done = make("setup", "PYTHON=no-such-python", folder=tmp_path)
    assert done.returncode != 0 and "needs Python 3.1" in done.stderr and "PYTHON=" in done.stderr
    (tmp_path / ".venv").mkdir()  # which was not there before
    (tmp_path / make("-s", "--eval=stamp: ; @echo $(STAMP)", "stamp", folder=tmp_path).stdout.strip()).touch()
    assert "pip" not in make("-n", "setup", folder=tmp_path).stdout
    assert '-e ".[cluster,peers,docs]"' in make("-n", "setup-all", folder=tmp_path).stdout
    with (tmp_path / "requirements.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert "pip" in make("-n", "setup", folder=tmp_path).stdout


def test_ci_runs_everything_once():
    printed = make("-n", "setup-all", "test", "test-all", "STAMP=pyproject.toml").stdout
    lines = [line for line in printed.splitlines() if "pytest" in line or "ruff" in line]
    assert len(lines) == len(set(lines)) == 7, printed  # the long tests in two: profiles alone, then all others
    notebooks = re.findall(r"notebooks/\w+\.ipynb", printed)
    assert sorted(notebooks) == sorted(f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb"))
    assert "make setup-all test test-all" in (ROOT / ".ci" / "run").read_text()
