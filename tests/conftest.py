"""What every test starts from: one thread, seeds, no window, and caches in a folder of their own."""

import os
import shutil

# Before torch, numpy and matplotlib are imported, and for the subprocesses that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ.pop("SPEEDKIT_PROFILE", None)

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

OWN_FOLDERS = {
    "SPEEDKIT_CACHE_DIR": "speedkit",
    "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "jupyter-config",
    "JUPYTER_DATA_DIR": "jupyter-data",
    "JUPYTER_RUNTIME_DIR": "jupyter-runtime",
    "MPLCONFIGDIR": "matplotlib",
}


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep caches and settings of the tests apart from the user's; one set per session, so that data is made once."""
    root = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for variable, folder in OWN_FOLDERS.items():
            (root / folder).mkdir()
            patch.setenv(variable, str(root / folder))
        yield


@pytest.fixture
def chromium() -> str:
    """The path of Chromium, without which a test is skipped, but not in CI."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    why = "the browser tests need Chromium: make system installs it"
    return pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries that draw from the legacy generator
    torch.manual_seed(0)
