"""Find the lines of a stretch of training that make the host wait for the device, with what each costs."""

import collections
import contextlib
import dataclasses
import linecache
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result's shape or value the host must know: on a GPU each waits for all work queued before it.
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
HANDING_OVER = ("tolist", "numpy", "cpu")  # methods that need no operation where the tensor lies in the host's memory
# What may stand between a line that makes the host wait and the wait itself.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), warnings.__file__, contextlib.__file__)
Note = Callable[[float], None]  # takes the seconds of a wait


@dataclasses.dataclass(frozen=True)
class Sync:
    """A line that made the host wait: the innermost one outside of PyTorch."""

    file: str
    line: int
    code: str  # what stands there
    count: int
    seconds: float  # all its waits together; on a CPU the reads themselves

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.code}"


def audit(function: Callable[[], Any], device: torch.device | str = "cpu") -> list[Sync]:
    """Call `function()` and return the lines in it that made the host wait; see `auditing`."""
    with auditing(device) as syncs:
        function()
    return syncs


@contextlib.contextmanager
def auditing(device: torch.device | str = "cpu") -> Iterator[list[Sync]]:
    """Find the lines inside the block that make the host wait; after it they are listed, the most expensive first.

    On a GPU these are the waits that CUDA's sync debug mode reports, compiled code included; neither event waits nor
    `torch.cuda.synchronize`. On a CPU they are the reads that would make a GPU's host wait, compiled code run as eager,
    and those of numbers in the host's memory, such as a loader's indices. It costs time: let it see a few steps.
    """
    waits = collections.defaultdict[tuple[str, int], list[float]](list)
    syncs: list[Sync] = []

    def note(seconds: float) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        if frame:
            waits[frame.f_code.co_filename, frame.f_lineno].append(seconds)

    try:
        with _cuda_waits(note) if torch.device(device).type == "cuda" else _cpu_reads(note):
            yield syncs
    finally:  # a loop that ends before the audit does has shown some
        for (file, line), costs in waits.items():
            syncs.append(Sync(file, line, linecache.getline(file, line).strip(), len(costs), sum(costs)))
        syncs.sort(key=lambda sync: -sync.seconds)


@contextlib.contextmanager
def _cpu_reads(note: Note) -> Iterator[None]:
    """Note each read inside, with all code eager: compiled code that meets a dispatch mode stays off for good."""

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*args, **kwargs)
            note(time.perf_counter() - began_s)
            return result

        return run

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
            indices = args[1] if operation is torch.ops.aten.index.Tensor else ()
            masked = any(index is not None and index.dtype == torch.bool for index in indices)
            reads = masked or operation.overloadpacket.__name__ in READS
            return (noted(operation) if reads else operation)(*args, **(kwargs or {}))

    methods: dict[str, Any] = {name: noted(getattr(torch.Tensor, name)) for name in HANDING_OVER}
    with torch.compiler.set_stance("force_eager"), Reads(), patch.multiple(torch.Tensor, **methods):
        yield


@contextlib.contextmanager
def _cuda_waits(note: Note) -> Iterator[None]:
    """Note each wait inside: PyTorch warns as it ends, and it began after the last call or return in Python."""
    last_s = time.perf_counter()

    def on_call(frame: FrameType, event: str, called: Any) -> None:
        nonlocal last_s
        if frame.f_code.co_filename not in (__file__, warnings.__file__):  # the warning is on its way
            last_s = time.perf_counter()

    def on_warning(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            note(time.perf_counter() - last_s)

    mode = torch.cuda.get_sync_debug_mode()
    profile = sys.getprofile()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = on_warning  # for any other, too: a warning of two steps is lost
        torch.cuda.set_sync_debug_mode("warn")
        sys.setprofile(on_call)
        try:
            yield
        finally:
            sys.setprofile(profile)
            torch.cuda.set_sync_debug_mode(mode)
