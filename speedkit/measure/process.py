"""What measuring changes of the whole process, and puts back: random states, and PyTorch's switches of precision."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.backends import cuda, cudnn, mkldnn

from speedkit.machine import this_machine

# Each has a `fp32_precision`, the newer switches. The first is that of all others that have none of their own.
SWITCHES: tuple[Any, ...] = (
    torch.backends,
    cudnn,
    cudnn.conv,  # type: ignore[attr-defined]
    cudnn.rnn,  # type: ignore[attr-defined]
    cuda.matmul,
    mkldnn.matmul,  # type: ignore[attr-defined]
)


@contextlib.contextmanager
def process_kept(device: torch.device | str) -> Iterator[None]:
    """Leave random states, those of `device` too, and switches as they are before the block, also where it raises."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - somebody's data set may draw from it
    newer = [switch.fp32_precision for switch in SWITCHES]
    products = _or_none(torch.get_float32_matmul_precision)
    tf32 = _or_none(lambda: cudnn.allow_tf32)
    benchmark = cudnn.benchmark
    gpus = []
    if this_machine(device).device.type == "cuda":
        gpus.append(this_machine(device).device)
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        cudnn.benchmark = benchmark
        # The older switches cannot be set beside newer ones, so these come last.
        cudnn.fp32_precision = "none"
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if tf32 is not None:
            cudnn.allow_tf32 = tf32
        for switch, precision in zip(SWITCHES, newer, strict=True):
            switch.fp32_precision = precision


def _or_none(older_switch: Callable[[], Any]) -> Any:
    """Return what an older switch says; None where a newer one has been set that it cannot name."""
    try:
        return older_switch()
    except RuntimeError:
        return None
