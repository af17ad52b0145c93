"""What ran and on what: hashes of code, versions, the commit, where the notebooks are, power and clocks."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import speedkit
from speedkit.errors import UsageError
from speedkit.hardware import nvml_facts

PACKAGE = Path(speedkit.__file__).parent


def code_sha256(notebook: str | Path | Mapping[str, Any], modules: Sequence[str] = ()) -> str:
    """Return the hash of a notebook's code cells (its file, or what nbformat read) and of its declared modules.

    Outputs, Markdown, lines of comment and cells tagged `injected-parameters` do not count. Raises UsageError for a
    module that is not found.
    """
    content = notebook if isinstance(notebook, Mapping) else json.loads(Path(notebook).read_text(encoding="utf-8"))
    code = [
        strip_comments("".join(cell["source"]))
        for cell in content["cells"]
        if cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", [])
    ]
    return _sha256([*code, *(name + module_sha256(name) for name in sorted(set(modules)))])


def is_current(record: Mapping[str, Any] | None, notebook: Path) -> bool:
    """Whether `record` was made by the code that the `notebook`, and the modules it measures, have now."""
    try:
        return record is not None and record.get("code_sha256") == code_sha256(notebook, record.get("modules", []))
    except (UsageError, OSError):  # a module or the notebook is no longer there
        return False


def module_sha256(name: str) -> str:
    """Return the hash of a module's source without its comments; of a package, that of all its modules."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise UsageError(f'module "{name}" has no source to hash: name modules as in `import`, such as speedkit.plan')
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    return _sha256([f"{file.relative_to(origin.parent)}\0{strip_comments(file.read_text('utf-8'))}" for file in files])


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()


def strip_comments(source: str) -> str:
    """Return `source` without empty lines, lines that hold only a comment, and spaces at the end of lines."""
    lines = [line.rstrip() for line in source.splitlines()]
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def versions() -> dict[str, str | None]:
    """Return the versions that can change a measurement; None for what this build of PyTorch has not."""
    found = {name: importlib.metadata.version(name) for name in ("torchaudio", "torchvision", "numpy")}
    cudnn = str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None
    return {
        "speedkit": speedkit.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **found,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
    }


def commit() -> tuple[str, bool] | None:
    """Return (short hash, whether the package differs from it), or None when speedkit is not in a git checkout."""
    git = functools.partial(subprocess.check_output, cwd=PACKAGE, text=True, stderr=subprocess.DEVNULL, timeout=30)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])  # installed in another's checkout is not in it
        return git(["git", "rev-parse", "--short", "HEAD"]).strip(), bool(git(["git", "status", "--porcelain", "."]))
    return None


def notebooks_folder() -> Path:
    """Return the folder of the numbered notebooks: SPEEDKIT_NOTEBOOKS, else that beside the package."""
    folder = Path(os.environ.get("SPEEDKIT_NOTEBOOKS") or PACKAGE.parent / "notebooks")
    if not folder.is_dir():
        raise UsageError("there is no notebooks folder: run this in the checkout, or set SPEEDKIT_NOTEBOOKS to it")
    return folder.resolve()


def find_notebook(name: str) -> Path | None:
    """Return the file of the numbered notebook `name`, None where there is none."""
    with contextlib.suppress(UsageError):
        path = notebooks_folder() / f"{name}.ipynb"
        return path if path.is_file() else None
    return None


def gpu_state(device: torch.device, *names: str) -> dict[str, float]:
    """Return what NVML says of a GPU as to `names`, see `nvml_facts`; {} where it does not tell all of it."""
    if device.type != "cuda":
        return {}
    found = nvml_facts(str(torch.cuda.get_device_properties(device).uuid), *names)
    return found if len(found) == len(names) else {}
