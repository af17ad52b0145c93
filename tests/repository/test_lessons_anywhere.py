"""A lesson runs by papermill's own command from any folder: in a checkout, and where a wheel is installed."""

import os
import subprocess
import sys
import zipfile

import pytest
from test_repository import ROOT

LESSON = "14_prefetch.ipynb"  # of few seconds without a GPU
pytestmark = pytest.mark.slow


def run_lesson(notebook, folder, out, home):
    """Run `notebook` from `folder` with the package that lies in `home`."""
    command = [sys.executable, "-m", "papermill", notebook, out, "-p", "scale", "smoke", "--log-level", "ERROR"]
    environment = os.environ | {"PYTHONPATH": str(home), "SPEEDKIT_RUN_DIR": str(out.parent / "run")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and out.exists(), done.stderr[-2000:]


@pytest.mark.parametrize(("folder", "notebook"), [(".", f"notebooks/{LESSON}"), ("notebooks", LESSON)])
def test_a_lesson_runs_from_a_folder_of_the_checkout(folder, notebook, tmp_path):
    run_lesson(notebook, ROOT / folder, tmp_path / "out.ipynb", ROOT)


def test_a_lesson_of_the_wheel_runs_from_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")  # as pip install --no-deps --target does
    (tmp_path / "empty").mkdir()
    notebook = tmp_path / "site" / "speedkit" / "notebooks_data" / LESSON
    run_lesson(notebook, tmp_path / "empty", tmp_path / "out.ipynb", tmp_path / "site")
