"""What ran: versions, the commit, where the notebooks are, and whether a record still is of the code that is here."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import speedkit
from speedkit.files import read_json

PACKAGE = Path(speedkit.__file__).parent
ROOT = PACKAGE.parent
SHIPPED = PACKAGE / "notebooks_data"  # in an installed package; a checkout has notebooks/ beside the package
# What decides a measured figure, with the code of its notebook: as git's path patterns, from the package's folder.
MEASURED = (":(glob)[!_]*.py", "data", "train", "measure", "lab/workloads", ":(exclude)measure/words.py")


def git(*words: str, folder: Path | None = None) -> str:
    """Return what git prints in `folder`, by default the package's. Raises OSError or CalledProcessError."""
    command = ["git", *words]
    return subprocess.check_output(command, cwd=folder or PACKAGE, text=True, stderr=subprocess.DEVNULL)


def versions() -> dict[str, str | None]:
    """Return the versions that can change a measurement; None for what this build of PyTorch has not."""
    packages = [name for name in ("torchaudio", "torchvision", "numpy") if importlib.util.find_spec(name)]
    return {
        "speedkit": speedkit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }


def commit() -> tuple[str | None, bool | None]:
    """Return (short hash, whether the package differs from it).

    Outside a checkout of speedkit the hash is SPEEDKIT_COMMIT, None without it, and whether it fits is not known.
    """
    try:
        # The second is not there where the package is installed inside another project's checkout.
        revisions = git("rev-parse", "HEAD", "HEAD:./__init__.py")
        return revisions[:7], bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SPEEDKIT_COMMIT"), None


def is_current(record: Mapping[str, Any], notebook: Path) -> bool:
    """Return whether `notebook`, and all that decides a figure, still hold the code of the commit of `record`.

    A commit that is not known here is out of date.
    """
    if not record["commit"] or not unchanged_since(record["commit"]):
        return False
    try:
        before = git("show", f"{record['commit']}:./{notebook.name}", folder=notebook.parent)
        return code_of(json.loads(before)) == code_of(read_json(notebook))
    except (OSError, subprocess.CalledProcessError):  # the notebook was not there, or is not there now
        return False


@functools.lru_cache
def unchanged_since(revision: str) -> bool:
    """Return whether what decides a figure is as it was at a commit. Asked once per process."""
    try:
        git("diff", "--quiet", revision, "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def code_of(notebook: Mapping[str, Any]) -> list[str]:
    """Return the code cells of a notebook, without those that papermill or Colab added."""
    added = {"injected-parameters", "colab"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in code if not added & {*cell["metadata"].get("tags", [])}]


def notebooks_folder() -> Path:
    """Return the folder of the numbered notebooks: SPEEDKIT_NOTEBOOKS, else that in or beside the package."""
    own = SHIPPED if SHIPPED.exists() else ROOT / "notebooks"
    return Path(os.environ.get("SPEEDKIT_NOTEBOOKS") or own).resolve()
