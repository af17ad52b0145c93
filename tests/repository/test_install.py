"""An install that is no checkout: the light core, what the wheel brings along, and a tuning from anybody's folder."""

import html
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import python
from test_repository import PROJECT

from speedkit.measure.extras import EXTRAS

MAIN = "from speedkit import cli; cli.main()"
MINE = """
import torch
from torch.utils.data import TensorDataset
from speedkit import Recipe, from_dataset

def mine():
    size = int(open('data.txt').read())  # a path as the user has it
    points = TensorDataset(torch.randn(size, 8), torch.arange(size) % 2)
    return from_dataset(torch.nn.Linear(8, 2), points, points, recipe=Recipe(epochs=2))
"""
PACKAGES = {package: {*map(canonicalize_name, names)} for package, names in packages_distributions().items()}


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The command line where nothing can be imported but what the core depends on, in a folder with a workload."""
    folder, needed = tmp_path_factory.mktemp("light"), [*PROJECT["dependencies"]]
    (folder / "mine.py").write_text(MINE)
    (folder / "data.txt").write_text("64")
    core = {"torch-speedkit", "packaging"}  # setuptools, which torch needs, has its own
    while needed:
        requirement = Requirement(needed.pop())
        name = canonicalize_name(requirement.name)
        if name not in core and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            core.add(name)
            needed += requires(name) or []
    absent = [package for package, names in PACKAGES.items() if not names & core]
    program = f"import sys; sys.modules |= dict.fromkeys({absent}); {MAIN}"
    return lambda words: python("-c", program, *words.split(), folder=folder)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("train text --size tiny --steps 3 --out trained", ""),
        ("train mine:mine --steps 3 --out own", ""),
        pytest.param("profile text --size tiny --out seen", "", marks=pytest.mark.slow),
        ("train audio", "torchaudio audio"),
        ("train text --size tiny --precision fp8-emulated --out fp8", "torchao int8"),
    ],
)
def test_the_light_core_works_and_says_which_extra_is_missing(light, words, missing):
    done = light(words)
    sentence = 'package {} is not installed: pip install "torch-speedkit[{}]"\n'.format(*missing.split() or "  ")
    assert (done.returncode == 2 and done.stderr.endswith(sentence)) if missing else not done.returncode, done.stderr


@pytest.mark.slow
def test_a_tuning_without_the_packages_for_notebooks_leaves_all_but_notebook_and_pictures(light, tmp_path):
    done = light(f"tune mine:mine --optimizations host_syncs --seeds 2 --budget 120 --steps 20 --out {tmp_path}/tuned")
    missing = """package {} is not installed: pip install "torch-speedkit[notebooks]\""""
    assert done.returncode == 0 and f"no tune.ipynb: the {missing.format('papermill')}" in done.stderr, done.stderr
    assert {path.name for path in (tmp_path / "tuned").iterdir()} >= {"record.json", "plan.yaml", "report.html"}
    page = html.unescape((tmp_path / "tuned" / "report.html").read_text())
    assert f"No pictures: the {missing.format('matplotlib')}." in page and "<img" not in page
    assert not (tmp_path / "tuned" / "tune.ipynb").exists()
    assert "speedkit tune mine:mine --optimizations host_syncs" in page  # as it was typed
    assert "speedkit train mine:mine --steps 20 --plan plan.yaml" in page or "Nothing: plain PyTorch stays" in page


def test_each_package_that_may_be_missing_is_in_its_extra():
    for package, extra in EXTRAS.items():
        names = {canonicalize_name(Requirement(text).name) for text in PROJECT["optional-dependencies"][extra]}
        assert names & PACKAGES.get(package, {package}), (package, extra)  # which make setup-all may still have to add


@pytest.mark.slow
def test_a_torchaudio_for_another_torch_is_one_sentence(tmp_path):
    (tmp_path / "torchaudio.py").write_text("raise OSError('Could not load this library:\\n_torchaudio.so')")
    done = python("-m", "speedkit", "train", "speech", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "does not fit torch" in done.stderr


SHIPPED = """
from speedkit import cli
from speedkit.lab.notebooks import find_notebooks
from speedkit.lab.frameworks import read_table
from speedkit.lessons.claims import read_claims
from speedkit.lessons.pictures import drawing
find_notebooks(["90"]), read_table(), read_claims(), drawing("streams")
cli.main()
"""


@pytest.mark.slow
def test_a_wheel_brings_along_what_tunings_and_runs_need(installed, tmp_path):
    done = python("-c", SHIPPED, "publish", "21", folder=tmp_path, paths=[installed])  # which is for a checkout alone
    assert done.returncode == 2 and "clone it" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_tuning_of_ones_own_workload_ends_with_its_notebook(tmp_path):
    for name in ("claims", "pictures"):  # which a lesson's own modules were once called
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not for lessons')")
    (tmp_path / "data.txt").write_text("64")
    (tmp_path / "mine.py").write_text(MINE)
    tune = "tune mine:mine --optimizations host_syncs --seeds 2 --budget 120 --out run"
    done = python("-m", "speedkit", *tune.split(), folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "run" / "tune.ipynb").exists(), done.stderr
