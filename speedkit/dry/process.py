"""Run a function in a process of its own that has a GPU which is not there."""

import importlib
import linecache
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from speedkit.dry.build import LIBRARY, MAY_DO_NOTHING, NVRTC, build
from speedkit.dry.gpus import Gpu
from speedkit.errors import SpeedkitError


def run(what: str, gpu: Gpu, timeout_s: float = 600.0, **arguments: Any) -> Any:
    """Return what a function returns there, called with `arguments`: `what` is package.module:function.

    Raises SpeedkitError where it fails, with what the process wrote last, and where it asks for what the stand-in does
    not have.
    """
    name = arguments.get("script", what)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "call").write_bytes(packed((what, arguments)))
        command = [sys.executable, "-m", "speedkit.dry.process", place]
        variables = environment(gpu) | {"DRY_GPU_NOTES": str(folder / "notes")}
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            ended = f"ended with {done.returncode}:\n{done.stderr[-2000:]}"
        except subprocess.TimeoutExpired:
            ended = f"has not ended after {timeout_s:g} s"
        refuse_unknown(f"{name} on {gpu.name}", folder / "notes")
        returned, error = None, ended
        if (folder / "answer").exists():
            returned, error = pickle.loads((folder / "answer").read_bytes())
        if error and (folder / "read back").exists():
            line = (folder / "read back").read_text()
            raise SpeedkitError(f"{name} reads numbers back from a GPU that has none, at {line}; then it {error}")
    if error:
        raise SpeedkitError(f"{name} on {gpu.name} {error}")
    return returned


def packed(call: tuple[str, dict[str, Any]]) -> bytes:
    """Return a call for another process; where cloudpickle is installed, with what notebooks and functions define."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle.dumps(call)
    return cloudpickle.dumps(call)


def refuse_unknown(what: str, notes: Path) -> None:
    """Raise SpeedkitError where a process has noted functions or kernels that the stand-in does not know."""
    lines = [line.split("\t") for line in notes.read_text().splitlines()] if notes.exists() else []
    stubs = sorted({name for kind, name in lines if kind == "stub"} - MAY_DO_NOTHING)
    if stubs:
        calls = f"torch {torch.__version__} calls functions of CUDA that the GPU that is not there lacks"
        raise SpeedkitError(f"{what}: {calls}: {', '.join(stubs)}")
    site = Path(torch.__file__).parents[1]
    for kind, name in lines:
        path = Path(name)
        ours = path.is_relative_to(site) and path.relative_to(site).parts[0].startswith(("torch", "nvidia"))
        if kind == "kernels" and not ours:
            raise SpeedkitError(
                f"{what}: {path} has CUDA kernels of its own: a GPU that is not there has PyTorch's only"
            )


def environment(gpu: Gpu) -> dict[str, str]:
    """Return the environment of a process that has `gpu`."""
    folder = build()
    facts = {f"DRY_GPU_{name.upper()}": str(value) for name, value in gpu._asdict().items()}
    return (
        os.environ
        | facts
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "DRY_GPU_LIBRARY": str(folder / LIBRARY),
            "LD_PRELOAD": f"{folder / LIBRARY}:{folder / NVRTC}",
            "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "TRITON_LIBCUDA_PATH": str(folder),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpu.devices))),
            "KINETO_LOG_LEVEL": "99",  # its GPU profiler finds no GPU
        }
    )


def answer(folder: Path) -> tuple[Any, str]:
    """Return what the call in a folder returns, and how it failed, "" where it did not."""
    what, arguments = pickle.loads((folder / "call").read_bytes())
    try:
        if "script" in arguments:
            keep_reads(folder / "read back")
        module, _, function = what.partition(":")
        return getattr(importlib.import_module(module), function)(**arguments), ""
    except SpeedkitError as error:
        return None, f"failed: {error}"
    except (Exception, SystemExit):
        return None, f"failed:\n{traceback.format_exc()}"


def keep_reads(path: Path) -> None:
    """Keep in the file at `path` which line of a script was the last to read from the GPU."""

    last = ""

    def note(_message: object, _kind: object, filename: str, number: int, *_more: object) -> None:
        nonlocal last
        line = f"line {number} of {filename}: {linecache.getline(filename, number).strip()}"
        if line != last and "/torch/" not in filename:  # which reads what it needs itself
            last = line
            path.write_text(line)

    warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
    warnings.showwarning = note  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("warn")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "answer").write_bytes(pickle.dumps(answer(place)))
