"""What makes the host wait: each place in a stretch of training that reads the device, with its cost."""

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

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result's shape or value the host must know: on a GPU each waits for all work queued before it.
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
HANDING_OVER = ("tolist", "numpy", "cpu")  # methods that need no operation where the tensor lies in the host's memory
Note = Callable[[FrameType, float], None]
# What may stand between a place that makes the host wait and the wait itself.
NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), warnings.__file__, contextlib.__file__)


@dataclasses.dataclass(frozen=True)
class Sync:
    """One place that made the host wait: the innermost line that is not PyTorch's own."""

    file: str
    line: int
    code: str  # what stands there
    count: int
    seconds: float  # all its waits together; on a CPU the reads themselves

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.count} times, {1e3 * self.seconds:.3g} ms: {self.code}"


@contextlib.contextmanager
def auditing(device: torch.device | str = "cpu") -> Iterator[list[Sync]]:
    """Find the places inside the block that make the host wait; after it they are listed, the most expensive first.

    On a GPU these are the waits that CUDA's sync debug mode reports, compiled code included; neither event waits nor
    `torch.cuda.synchronize`. On a CPU they are the reads that would make a GPU's host wait, compiled code run as eager,
    and those of numbers in the host's memory, such as a loader's indices. It costs time: let it see a few steps.
    """
    found, syncs = dict[tuple[str, int], list[float]](), list[Sync]()
    watch = _cuda_waits if torch.device(device).type == "cuda" else _cpu_reads
    try:
        with watch(lambda frame, seconds: found.setdefault(_place(frame), []).append(seconds)):
            yield syncs
    finally:
        syncs += (Sync(*at, linecache.getline(*at).strip(), len(costs), sum(costs)) for at, costs in found.items())
        syncs.sort(key=lambda sync: -sync.seconds)


def audit(function: Callable[[], Any], device: torch.device | str = "cpu") -> list[Sync]:
    """Call `function()` and return the places in it that made the host wait; see `auditing`."""
    with auditing(device) as found:
        function()
    return found


def _place(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line of the innermost frame that is neither PyTorch's nor this module's."""
    while frame and frame.f_code.co_filename.startswith(NOT_THEIRS) and frame.f_back:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)


class _Reads(TorchDispatchMode):
    """Notes every operation by which the host learns a value."""

    def __init__(self, note: Note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began_s = time.perf_counter()
        result = operation(*args, **(kwargs or {}))
        indices = args[1] if operation is torch.ops.aten.index.Tensor else ()
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if masked or operation.overloadpacket.__name__ in READS:
            self.note(sys._getframe(1), time.perf_counter() - began_s)
        return result


@contextlib.contextmanager
def _cpu_reads(note: Note) -> Iterator[None]:
    """Note each read inside, with all code eager: compiled code that meets a dispatch mode stays off for good."""
    began_s = 0.0

    def on_call(frame: FrameType, event: str, called: Any) -> None:
        nonlocal began_s
        if event in ("c_call", "c_return") and called.__name__ in HANDING_OVER and isinstance(called.__self__, Tensor):
            if event == "c_return":
                note(frame, time.perf_counter() - began_s)
            began_s = time.perf_counter()

    with torch.compiler.set_stance("force_eager"), _Reads(note), _profiled_by(on_call):
        yield


@contextlib.contextmanager
def _cuda_waits(note: Note) -> Iterator[None]:
    """Note each wait inside: PyTorch warns as it ends, and it began after the last call or return in Python."""
    last_s = time.perf_counter()

    def on_call(frame: FrameType, event: str, called: Any) -> None:
        nonlocal last_s
        if frame.f_code.co_filename not in (__file__, warnings.__file__):  # the warning is on its way
            last_s = time.perf_counter()

    def on_warning(message: Any, *others: Any, **more: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            note(sys._getframe(1), time.perf_counter() - last_s)
        else:
            shown(message, *others, **more)

    before, shown = torch.cuda.get_sync_debug_mode(), warnings.showwarning
    with warnings.catch_warnings(), _profiled_by(on_call):
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.showwarning = on_warning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _profiled_by(on_call: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(before)
