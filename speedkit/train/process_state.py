"""What training changes for the whole process, put aside and put back."""

import contextlib
import itertools
import os
from collections.abc import Iterator

import torch

# The switches of float32 products by backend and operator, those of all operators first: they set the others.
PRODUCTS = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "KINETO_LOG_LEVEL")
own_threads: list[int] = []  # the process's own number of threads, while a plan has set another


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
        kept.callback(set_threads, None)
        for name in VARIABLES:
            if name in os.environ:
                kept.callback(os.environ.update, {name: os.environ[name]})
            kept.callback(os.environ.pop, name, None)  # before that: the last callback comes first
        yield


def keep_switches(kept: contextlib.ExitStack) -> None:
    """Let `kept` put PyTorch's switches back."""
    products = torch._C._get_fp32_precision_getter
    for backend, operator in reversed(PRODUCTS):  # the last one is put back first
        kept.callback(torch._C._set_fp32_precision_setter, backend, operator, products(backend, operator))
    with contextlib.suppress(RuntimeError):  # older getters raise where somebody has set the newer switches
        kept.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    with contextlib.suppress(RuntimeError):
        kept.callback(torch._C._set_cudnn_allow_tf32, torch._C._get_cudnn_allow_tf32())
    kept.callback(torch._C._set_cudnn_benchmark, torch.backends.cudnn.benchmark)
    kept.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
    kept.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def set_threads(count: int | None) -> None:
    """Set PyTorch's threads within one operation on the CPU; None is the process's own number."""
    if count is not None:
        if not own_threads:
            own_threads.append(torch.get_num_threads())
        torch.set_num_threads(count)
    elif own_threads:
        torch.set_num_threads(own_threads.pop())


def set_deterministic(wanted: bool) -> None:
    """Let CUDA run reproducible kernels alone, if that is `wanted`; it raises later where it has none."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
