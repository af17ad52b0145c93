"""The Makefile: values arrive as typed, a set-up is made once and resumed, CI runs everything once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell of its own: nothing of the make that may be running this test reaches it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, env=inherited | environment)


@pytest.fixture
def climb(tmp_path):
    """Run `make climb` with a speedkit that prints its arguments, and return them."""
    speedkit = tmp_path / "speedkit"
    speedkit.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    speedkit.chmod(0o755)

    def run(*variables: str) -> list[str]:
        # The stamp of the set-up is a file that is there: whether this clone is set up does not matter here.
        done = make("-s", "climb", "STAMP=pyproject.toml", f"SPEEDKIT={speedkit}", *variables)
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)

    return run


@pytest.mark.parametrize("value", [r"^(\d)_[0-4]\.wav$", "$HOME $(shell id) ${x", "a 'b' \"c\", `d`;#*"])
def test_make_hands_values_to_speedkit_as_typed(climb, value):
    names = ("OUT", "DATA", "LABELS", "LABEL_PATTERN", "TEST_PATTERN", "BUDGET")
    options = ("--out", "--data-dir", "--labels", "--label-pattern", "--test-pattern", "--budget")
    arguments = climb(*(f"{name}={value}" for name in names))
    assert arguments == ["climb", "audio", *(word for option in options for word in (option, value))]


def test_make_climb_without_variables_writes_to_a_new_folder_of_runs(climb):
    _, workload, option, out, *others = climb("WORKLOAD=image", "ARGS=--size tiny --seed 3")
    assert (workload, option, others) == ("image", "--out", ["--size", "tiny", "--seed", "3"])
    assert re.fullmatch(r"runs/\d{8}-\d{6}", out)


@pytest.fixture
def clone(tmp_path):
    """A folder with what make needs to set up."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    return folder


def stamp(folder: Path) -> Path:
    """Return the file that says that the set-up of `folder` is finished."""
    return folder / make("-s", "--eval=stamp: ; @echo $(STAMP)", "stamp", folder=folder).stdout.strip()


def test_second_make_installs_nothing_and_a_new_lock_installs(clone):
    done = make("setup", "PYTHON=no-such-python", folder=clone)
    assert done.returncode != 0 and "needs Python 3.11 or 3.12" in done.stderr and "PYTHON=" in done.stderr
    (clone / ".venv").mkdir()  # which was not there before
    stamp(clone).touch()
    assert "pip" not in make("-n", "setup", folder=clone).stdout
    with (clone / "requirements.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert "pip" in make("-n", "setup", folder=clone).stdout


BACKEND = """
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    info, name = "speedkit-0.1.dist-info", "speedkit-0.1-py3-none-any.whl"
    files = {
        "greet.py": "def main(): print('here')",
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: speedkit\\nVersion: 0.1\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        f"{info}/entry_points.txt": "[console_scripts]\\nspeedkit = greet:main\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return name
"""


@pytest.mark.slow
def test_interrupted_setup_is_resumed_and_a_moved_clone_is_set_up_anew(clone, tmp_path):
    (clone / "backend.py").write_text(BACKEND)
    (clone / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

    def setup(folder: Path, lock: str = "") -> str:
        (folder / "requirements.lock").write_text(lock)
        done = make("setup", f"PYTHON={sys.executable}", folder=folder, **offline)
        assert (done.returncode == 0) == stamp(folder).exists() == (not lock), done.stderr
        assert lock or subprocess.check_output([folder / ".venv" / "bin" / "speedkit"], text=True) == "here\n"
        return done.stdout + done.stderr

    assert "6 GB" in setup(clone)
    assert "6 GB" not in setup(clone), "nothing is left to install"

    # As a kill in the middle of a package leaves it: its files are there, its command and pip's own marks are not.
    stamp(clone).unlink()
    [information] = clone.glob(".venv/lib/python3*/site-packages/speedkit-0.1.dist-info")
    (information / "INSTALLER").unlink()
    (clone / ".venv" / "bin" / "speedkit").unlink()
    setup(clone)
    assert "run make again" in setup(clone, lock="absent==1.0\n")
    setup(clone.rename(tmp_path / "elsewhere"))


def test_ci_runs_everything_once():
    done = make("-n", "test", "test-all", "STAMP=pyproject.toml")
    lines = [line for line in done.stdout.splitlines() if "pytest" in line or "ruff" in line]
    assert len(lines) == len(set(lines)) == 6, done.stdout + done.stderr
    notebooks = re.findall(r"notebooks/\w+\.ipynb", done.stdout)
    assert sorted(notebooks) == sorted(f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb"))
    assert "make test test-all" in (ROOT / ".ci" / "run").read_text()
