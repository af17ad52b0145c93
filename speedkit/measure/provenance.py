"""What ran and on what: hashes of code, versions, the commit, where the notebooks are, power and clocks."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import speedkit
from speedkit.files import read_json

PACKAGE = Path(speedkit.__file__).parent
ROOT = PACKAGE.parent
SHIPPED = PACKAGE / "notebooks_data"  # in an installed package; a checkout has notebooks/ beside the package


def code_sha256(notebook: str | Path | Mapping[str, Any], modules: Sequence[str] = ()) -> str:
    """Return the hash of a notebook's code cells (its file, or what nbformat read) and of `modules`.

    Outputs, Markdown, lines of comment and cells tagged `injected-parameters` or `colab` do not count.
    """
    content = notebook if isinstance(notebook, Mapping) else read_json(notebook)
    code = [
        strip_comments("".join(cell["source"]))
        for cell in content["cells"]
        if cell["cell_type"] == "code" and not {"injected-parameters", "colab"} & {*cell["metadata"].get("tags", [])}
    ]
    return _sha256([*code, *(name + module_sha256(name) for name in sorted(set(modules)))])


def module_sha256(name: str) -> str:
    """Return the hash of a module's source without its comments; of a package, that of all its modules.

    `name` is dotted and begins at the repository: "speedkit.train", "notebooks.claims".
    """
    place, *names = name.split(".")
    path = (notebooks_folder() if place == "notebooks" else ROOT / place).joinpath(*names)
    folder, files = (path, sorted(path.rglob("*.py"))) if path.is_dir() else (path.parent, [path.with_suffix(".py")])
    return _sha256([f"{file.relative_to(folder)}\0{strip_comments(file.read_text('utf-8'))}" for file in files])


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()


def strip_comments(source: str) -> str:
    """Return `source` without empty lines, lines that hold only a comment, and spaces at the end of lines."""
    lines = [line.rstrip() for line in source.splitlines()]
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def versions() -> dict[str, str | None]:
    """Return the versions that can change a measurement; None for what this build of PyTorch has not."""
    extras = [name for name in ("torchaudio", "torchvision") if importlib.util.find_spec(name)]
    return {
        "speedkit": speedkit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in (*extras, "numpy")},
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None,
    }


def commit() -> tuple[str | None, bool | None]:
    """Return (short hash, whether the package differs from it); None for both outside a git checkout of speedkit."""
    git = functools.partial(subprocess.check_output, cwd=PACKAGE, text=True, stderr=subprocess.DEVNULL)
    try:
        # The second is not there where the package is installed inside another project's checkout.
        revisions = git(["git", "rev-parse", "HEAD", "HEAD:./__init__.py"])
        return revisions[:7], bool(git(["git", "status", "--porcelain", "."]))
    except (OSError, subprocess.SubprocessError):
        return None, None


def notebooks_folder() -> Path:
    """Return the folder of the numbered notebooks: SPEEDKIT_NOTEBOOKS, else that in or beside the package."""
    own = SHIPPED if SHIPPED.exists() else ROOT / "notebooks"
    return Path(os.environ.get("SPEEDKIT_NOTEBOOKS") or own).resolve()
