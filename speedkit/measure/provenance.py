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
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import speedkit
from speedkit.errors import UsageError
from speedkit.hardware import nvml_facts

PACKAGE = Path(speedkit.__file__).parent
QUOTES = ('"', "'", 'r"', "r'")  # how a docstring can begin: neither bytes nor an f-string is one


def code_sha256(notebook: str | Path | Mapping[str, Any], modules: Sequence[str] = ()) -> str:
    """Return the hash of a notebook's code cells (its file, or what nbformat read) and of its declared modules.

    Outputs, Markdown, comments, docstrings and cells tagged `injected-parameters` do not count: what remains decides
    what a run does. The same on every supported version of Python. Raises UsageError for a module that is not found.
    """
    content = notebook if isinstance(notebook, Mapping) else json.loads(Path(notebook).read_text(encoding="utf-8"))
    code = [
        ("cell", essence("".join(cell["source"]), keep_module_docstring=True))
        for cell in content["cells"]
        if cell["cell_type"] == "code" and "injected-parameters" not in cell["metadata"].get("tags", [])
    ]
    return _sha256([*code, *((name, module_sha256(name)) for name in sorted(set(modules)))])


def is_current(record: Mapping[str, Any] | None, notebook: Path) -> bool:
    """Whether `record` was made by the code that the `notebook`, and the modules it measures, have now."""
    try:
        return record is not None and record.get("code_sha256") == code_sha256(notebook, record.get("modules", []))
    except (UsageError, OSError):  # a module or the notebook is no longer there
        return False


def module_sha256(name: str) -> str:
    """Return the hash of a module's source without comments and docstrings; of a package, that of all its modules."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise UsageError(f'module "{name}" has no source to hash: name modules as in `import`, such as speedkit.plan')
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    return _sha256((file.relative_to(origin.parent).as_posix(), essence(file.read_text("utf-8"))) for file in files)


def _sha256(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"\0{name}\0{text}" for name, text in parts).encode()).hexdigest()


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
    """Return the folder of the numbered notebooks: SPEEDKIT_NOTEBOOKS, else beside the package or above us."""
    named, here = os.environ.get("SPEEDKIT_NOTEBOOKS"), Path.cwd()
    for folder in [Path(named)] if named else [path / "notebooks" for path in (PACKAGE.parent, here, *here.parents)]:
        if folder.is_dir() and (named or (folder / "claims.csv").is_file()):
            return folder.resolve()
    where = f"at SPEEDKIT_NOTEBOOKS={named}" if named else "here"
    raise UsageError(f"there is no notebooks folder {where}: run this in the checkout, or set SPEEDKIT_NOTEBOOKS to it")


def find_notebook(name: str) -> Path | None:
    """Return the file of the notebook `name`, looked for in the current folder and among the numbered ones."""
    folders = [Path.cwd()]
    with contextlib.suppress(UsageError):
        folders.append(notebooks_folder())
    return next((path for folder in folders if (path := folder / f"{name}.ipynb").is_file()), None)


def gpu_state(device: torch.device) -> dict[str, float]:
    """Return power_w, sm_hz, memory_hz and energy_j (since the driver was loaded) of an NVIDIA GPU; {} if unknown."""
    if device.type != "cuda":
        return {}
    names = ("power_w", "sm_hz", "memory_hz", "energy_j")
    found = nvml_facts(str(torch.cuda.get_device_properties(device).uuid), *names)
    return found if len(found) == len(names) else {}
