"""A lesson runs by papermill's own command from any folder: in a checkout, and where a wheel is installed."""

import pytest
from processes import ROOT, python

LESSON = "14_prefetch.ipynb"  # of few seconds without a GPU
pytestmark = pytest.mark.slow


def run_lesson(notebook, folder, home, tmp_path):
    """Run `notebook` from `folder` with the package that lies in `home`."""
    out = tmp_path / "out.ipynb"
    words = ["-m", "papermill", notebook, out, "-p", "scale", "smoke", "--log-level", "ERROR"]
    done = python(*words, folder=folder, paths=[home], SPEEDKIT_RUN_DIR=str(tmp_path / "run"))
    assert done.returncode == 0 and out.exists(), done.stderr[-2000:]


@pytest.mark.parametrize(("folder", "notebook"), [(".", f"notebooks/{LESSON}"), ("notebooks", LESSON)])
def test_a_lesson_runs_from_a_folder_of_the_checkout(folder, notebook, tmp_path):
    run_lesson(notebook, ROOT / folder, ROOT, tmp_path)


def test_a_lesson_of_the_wheel_runs_from_an_empty_folder(installed, tmp_path):
    (tmp_path / "empty").mkdir()
    notebook = installed / "speedkit" / "notebooks_data" / LESSON
    run_lesson(notebook, tmp_path / "empty", installed, tmp_path)
