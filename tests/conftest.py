"""What every test starts from: one thread, seeds, no window, and caches in a folder of their own."""

import contextlib
import dataclasses
import importlib.util
import os
import shutil

# Before torch, numpy and matplotlib are imported, and for the subprocesses that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ.pop("SPEEDKIT_SCALE", None)

import random
import signal
import sys
import zipfile

import numpy as np
import pytest
import soundfile
import torch
from processes import ROOT, python

from speedkit import machine

torch.set_num_threads(1)

OWN_FOLDERS = (
    "SPEEDKIT_CACHE_DIR",
    "IPYTHONDIR",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "MPLCONFIGDIR",
)


def pytest_addoption(parser):
    parser.addoption("--on-silicon", action="store_true", help="tests/dry: count on the GPU of this machine, too")


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory):
    """Keep caches and settings of the tests apart from the user's; one set per session, so that data is made once."""
    root = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for variable in OWN_FOLDERS:
            (root / variable).mkdir()
            patch.setenv(variable, str(root / variable))
        if importlib.util.find_spec("speedkit.measure"):  # tests/core runs without it
            patch.setattr("speedkit.measure.peaks.BUDGET_S", 0.02)  # rough peaks will do
        yield


@pytest.fixture
def browser():
    """Chromium, driven by Playwright; without it a test is skipped, but not in CI."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        why = "the browser tests need Chromium: make system installs it"
        return pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """Two classes of 24 tones of 0.5 s on disk, in class-named subfolders.

    Of shorter ones oneDNN's convolutions for AMX make NaN in bfloat16: stride 2 over features two frames wide.
    """
    root, rng = tmp_path_factory.mktemp("tones"), np.random.default_rng(0)
    for name, pitch in (("low", 300), ("high", 1500)):
        (root / name).mkdir()
        for index in range(24):
            wave = np.sin(2 * np.pi * pitch * np.arange(4000) / 8000) + rng.normal(0, 0.3, 4000)
            soundfile.write(root / name / f"{name}_{index}.wav", (wave / 4).astype(np.float32), 8000)
    return root


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A folder with what the wheel installs, as pip install --no-deps --target does."""
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "--target", "wheel", "--directory", folder, folder=ROOT)
    [wheel] = folder.glob("torch_speedkit-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def tuning():
    """The record of the tuning that is published."""
    from speedkit.lab.provenance import notebooks_folder
    from speedkit.lab.records import load_record

    return load_record(sorted(notebooks_folder().glob("records/*/90_tune.json"))[0])


@pytest.fixture
def speedkit(capsys, monkeypatch):
    """The command line in this process: words -> (exit code, what it printed, what it complained)."""
    from speedkit import cli
    from speedkit.data.batches import STOPS

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["speedkit", *map(str, words)])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back
        before = {number: signal.getsignal(number) for number in STOPS}
        try:
            with pytest.raises(SystemExit) as stopped:
                cli.main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return stopped.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def attack(capsys):
    """Count the tries of a group: `with attack(group) as tried`, and in it `with tried(what)` for each.

    One that falls does not end the group. At its end it says how many of them held, and fails where not all did.
    """

    @contextlib.contextmanager
    def attack(group):
        tries = []
        fallen = []

        @contextlib.contextmanager
        def tried(what):
            tries.append(what)
            try:
                yield
            except Exception as error:
                fallen.append(f"{what}: {type(error).__name__}: {error}")

        yield tried
        with capsys.disabled():
            print(f"\n{group}: {len(tries) - len(fallen)} of {len(tries)}")
        assert not fallen, "\n".join(fallen)

    return attack


@pytest.fixture
def every_format(monkeypatch):
    """Let this machine's CPU have every number format: it emulates those it lacks, slowly, to the same numbers."""
    facts, flags = machine._facts, ("avx512_bf16", "fp16_arith")
    monkeypatch.setattr(machine, "_facts", lambda device: dataclasses.replace(facts(device), cpu_flags=flags))


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries that draw from the legacy generator
    torch.manual_seed(0)
