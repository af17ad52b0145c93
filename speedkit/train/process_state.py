"""What training changes for the whole process, put aside and put back."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from speedkit.train.threads import restore_threads

# The switches of float32 products by backend and operator, those of all operators first: they set the others.
PRODUCTS = [
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
]
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "KINETO_LOG_LEVEL")


@contextlib.contextmanager
def process_state_kept(device: torch.device) -> Iterator[None]:
    """Put back, in the end, what a training on `device` changes for the whole process.

    That is torch's random state and threads, the switches of TF32 and cuDNN, and whether only reproducible kernels may
    run.
    """
    gpus: list[int] = []
    if device.type == "cuda" or torch.cuda.is_initialized():
        gpus = list(range(torch.cuda.device_count()))  # a seed is that of all
    with torch.random.fork_rng(gpus), contextlib.ExitStack() as kept:
        keep_switches(kept)
        kept.callback(restore_threads)
        for name in VARIABLES:
            kept.callback(set_variable, name, os.environ.get(name))
        yield


def keep_switches(kept: contextlib.ExitStack) -> None:
    """Let `kept` put PyTorch's switches back."""
    products = torch._C._get_fp32_precision_getter
    for backend, operator in reversed(PRODUCTS):  # the last one is put back first
        kept.callback(torch._C._set_fp32_precision_setter, backend, operator, products(backend, operator))
    kept.callback(set_if_known, torch.set_float32_matmul_precision, known(torch.get_float32_matmul_precision))
    kept.callback(set_if_known, torch._C._set_cudnn_allow_tf32, known(torch._C._get_cudnn_allow_tf32))
    kept.callback(torch._C._set_cudnn_benchmark, torch.backends.cudnn.benchmark)
    kept.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def known(getter: Callable[[], Any]) -> Any:
    """Return what an older getter does; None where it raises, for somebody has set the newer switches."""
    try:
        return getter()
    except RuntimeError:
        return None


def set_if_known(setter: Callable[[Any], object], value: Any) -> None:
    """Set `value`, if there is one."""
    if value is not None:
        setter(value)


def set_variable(name: str, value: str | None) -> None:
    """Give the environment variable `name` the `value`; None: there is no such variable."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
