"""What ran and on what: hashes of code, versions, the commit, where the notebooks are, power and clocks."""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import subprocess
import time
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import speedkit
from speedkit.errors import UsageError

PACKAGE = Path(speedkit.__file__).parent
QUOTES = ('"', "'", 'r"', "r'")  # how a docstring can begin: neither bytes nor an f-string is one


def code_sha256(notebook: str | Path | Mapping[str, Any], modules: Sequence[str] = ()) -> str:
    """Return the hash of a notebook's code cells (its file, or what nbformat read) and of its declared modules.

    Outputs, Markdown, comments, docstrings and cells tagged `injected-parameters` do not count: what remains decides
    what a run does. The same on every supported version of Python. Raises UsageError for a module that is not found.
    """
    digest = hashlib.sha256()
    content = notebook if isinstance(notebook, Mapping) else json.loads(Path(notebook).read_text(encoding="utf-8"))
    for cell in content["cells"]:
        if cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", []):
            digest.update(b"\0cell\0" + essence("".join(cell["source"]), keep_module_docstring=True).encode())
    for name in sorted(set(modules)):
        digest.update(f"\0{name}\0{module_sha256(name)}".encode())
    return digest.hexdigest()


def module_sha256(name: str) -> str:
    """Return the hash of a module's source without comments and docstrings; of a package, that of all its modules."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise UsageError(f'module "{name}" has no source to hash: name modules as in `import`, such as speedkit.plan')
    origin = Path(spec.origin)
    digest = hashlib.sha256()
    for file in sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]:
        relative = file.relative_to(origin.parent).as_posix()
        digest.update(f"\0{relative}\0{essence(file.read_text(encoding='utf-8'))}".encode())
    return digest.hexdigest()


def essence(source: str, keep_module_docstring: bool = False) -> str:
    """Return `source` without comments, docstrings, blank lines and trailing spaces.

    Cut out by position: what `ast.unparse` writes differs between versions of Python. `keep_module_docstring` is for
    notebook cells, which show a leading string. What is not Python (a `%magic`) loses blank lines and spaces only.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    lines = source.split("\n")
    gone, opens = [], not keep_module_docstring  # opens: whether a string here would be the first thing of its block
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        ast.parse(source)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            docstring = opens and token.type == tokenize.STRING and token.string.startswith(QUOTES)
            if docstring or token.type == tokenize.COMMENT:
                gone.append((token.start, token.end))
            opens = token.type == tokenize.INDENT or (opens and token.type in (tokenize.COMMENT, tokenize.NL))
    for (first, left), (last, right) in reversed(gone):  # from the end, so that earlier positions stay right
        lines[first - 1 : last] = [lines[first - 1][:left] + lines[last - 1][right:]]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def versions() -> dict[str, str | None]:
    """Return the versions that can change a measurement; None for what is not installed or has none here."""
    installed = {"speedkit": speedkit.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("torchaudio", "torchvision", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    cudnn = str(torch.backends.cudnn.version()) if torch.cuda.is_available() else None
    return {**installed, "cuda": torch.version.cuda, "cudnn": cudnn}


def commit() -> tuple[str, bool] | None:
    """Return (short hash, whether the package differs from it), or None when speedkit is not in a git checkout."""
    git = functools.partial(subprocess.check_output, cwd=PACKAGE, text=True, stderr=subprocess.DEVNULL, timeout=30)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])  # installed in another's checkout is not in it
        return git(["git", "rev-parse", "--short", "HEAD"]).strip(), bool(git(["git", "status", "--porcelain", "."]))
    return None


def notebooks_folder() -> Path:
    """Return the folder of the numbered notebooks: SPEEDKIT_NOTEBOOKS, else beside the package or above us."""
    named, here = os.environ.get("SPEEDKIT_NOTEBOOKS"), Path.cwd()
    for folder in [Path(named)] if named else [path / "notebooks" for path in (PACKAGE.parent, here, *here.parents)]:
        if folder.is_dir() and (named or (folder / "claims.csv").is_file()):
            return folder.resolve()
    where = f"at SPEEDKIT_NOTEBOOKS={named}" if named else "here"
    raise UsageError(f"there is no notebooks folder {where}: run this in the checkout, or set SPEEDKIT_NOTEBOOKS to it")


def find_notebook(name: str) -> Path | None:
    """Return the file of the notebook `name`, looked for in the current folder and among the numbered ones."""
    with contextlib.suppress(UsageError):
        for folder in (Path.cwd, notebooks_folder):
            if (path := folder() / f"{name}.ipynb").is_file():
                return path
    return None


class PowerLog:
    """Power, clocks and energy of an NVIDIA GPU by NVML, read when asked: no thread disturbs a measurement."""

    def __init__(self, device: torch.device):
        self.device, self.began_s = device, time.perf_counter()
        self.power: list[dict[str, Any]] = []
        self.clocks: list[dict[str, Any]] = []
        self.energy_j: list[float] = []

    def sample(self, label: str) -> None:
        """Note power, clocks and the energy since the driver was loaded, where NVML tells."""
        if self.device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # no NVML, or it refuses (MIG, virtual GPUs): costs facts, not the run
            import pynvml as nvml  # the module of the distribution nvidia-ml-py

            nvml.nvmlInit()
            # NVML counts all GPUs, CUDA only the visible ones: the UUID is what both call it.
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            at = {"label": label, "at_s": time.perf_counter() - self.began_s}
            self.power.append({**at, "power_w": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3})
            hz = {name: nvml.nvmlDeviceGetClockInfo(gpu, clock) * 1e6
                  for name, clock in (("sm_hz", nvml.NVML_CLOCK_SM), ("memory_hz", nvml.NVML_CLOCK_MEM))}  # fmt: skip
            self.clocks.append({**at, **hz})
            self.energy_j.append(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3)

    def summary(self) -> dict[str, Any]:
        """Return `power`, `clocks` (lists of samples) and `energy_j` (first to last sample); None where unknown."""
        spent_j = self.energy_j[-1] - self.energy_j[0] if self.energy_j else None
        return {"power": self.power or None, "clocks": self.clocks or None, "energy_j": spent_j}
