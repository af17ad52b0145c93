"""Run a function, or a script, in a process of its own that has a GPU which is not there."""

import importlib
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from speedkit.dry.build import LIBRARY, NVRTC, build
from speedkit.dry.gpus import Gpu
from speedkit.errors import SpeedkitError


def run(what: str, gpu: Gpu, timeout_s: float = 600.0, **arguments: Any) -> Any:
    """Return what a function returns there, called with `arguments`: `what` is package.module:function.

    Of a script, NAME.py, the arguments are `argv`, and nothing is returned. Raises SpeedkitError where it fails, with
    what the process wrote last.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        answer = Path(folder, "answer")
        call.write_bytes(pickle.dumps((what, arguments)))
        command = [sys.executable, "-m", "speedkit.dry.process", str(call), str(answer)]
        done = subprocess.run(
            command, env=environment(gpu), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if not answer.exists():
            raise SpeedkitError(f"{what} on {gpu.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        returned, error = pickle.loads(answer.read_bytes())
    if error:
        raise SpeedkitError(f"{what} on {gpu.name} failed:\n{error}")
    return returned


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


def answer(call: Path) -> tuple[Any, str]:
    """Return what the call in a file returns, and its error in words, "" without one."""
    what, arguments = pickle.loads(call.read_bytes())
    try:
        if what.endswith(".py"):
            sys.argv = [what, *arguments.get("argv", ())]
            runpy.run_path(what, run_name="__main__")
            return None, ""
        module, _, function = what.partition(":")
        return getattr(importlib.import_module(module), function)(**arguments), ""
    except Exception:
        return None, traceback.format_exc()


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(answer(Path(sys.argv[1]))))
