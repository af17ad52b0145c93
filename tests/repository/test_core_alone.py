"""The core, copied without the other folders, trains, resumes, and passes its own tests."""

import shutil

import pytest
from processes import ROOT, python

OTHERS = ("measure", "lab", "lessons", "dry", "cli", "__main__.py", "notebooks_data", "__pycache__")
PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import tiny
from speedkit import Plan, fit, from_loader
from speedkit.plan import PRESETS

samples = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
loader = DataLoader(samples, batch_size=16, shuffle=True)


def step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


own = from_loader(torch.nn.Linear(8, 2), loader, step)
for name, preset in PRESETS.items():
    plan = preset(tiny.CPU)
    for work in (own, tiny.points()):
        print(work.name, name, fit(work, plan=plan, device="cpu", progress=False, cache_dir="cache").steps)
print("begun", fit(tiny.points(epochs=1), plan=Plan(), device="cpu", out="run", progress=False).steps)
print("resumed", fit(tiny.points(epochs=1), plan=Plan(), device="cpu", out="run", resume=True, progress=False).steps)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with the core and its tests, and nothing else of the project."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "speedkit", folder / "speedkit", ignore=shutil.ignore_patterns(*OTHERS))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns(*OTHERS, "repository"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder, *words):
    return python(*words, folder=folder, paths=(folder, folder / "tests"))


@pytest.mark.slow
def test_the_core_alone_trains_by_every_preset_and_resumes(copy):
    done = run(copy, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("points") == 3 and "resumed" in done.stdout


@pytest.mark.slow
def test_the_core_alone_passes_its_tests(copy):
    done = run(copy, "-m", "pytest", "tests/core", "-m", "not slow", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]
