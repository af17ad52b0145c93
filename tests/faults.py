"""Faults to inject: out-of-memory of each kind above a chosen batch size, on any device; a full disk."""

import contextlib
import dataclasses
import resource

import torch

# What PyTorch and the libraries below it raise, in their own words.
OUT_OF_MEMORY = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn workspace": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "host": lambda: torch.empty(1 << 60),  # a real one
    "python": lambda: bytearray(1 << 62),  # a real one
    "c++": lambda: RuntimeError("std::bad_alloc"),
}


def strike(kind):
    """Raise an out-of-memory of `kind`."""
    error = OUT_OF_MEMORY[kind]()
    raise error


def limited(workload, fits, kind="cuda", where="forward", times=10**9, raises=None):
    """The workload, whose loss fails on more than `fits` samples: `times` times, in one place.

    `where` is the "forward" or the "backward" pass of training, or "evaluation". `raises` replaces the out-of-memory of
    `kind` by an exception of your own.
    """
    left = [times]

    def fail(*_):
        if left[0] > 0:
            left[0] -= 1
            if raises is not None:
                raise raises
            strike(kind)

    def loss(model, batch, recipe):
        beyond = len(batch.inputs) > fits
        if beyond and where == ("forward" if model.training else "evaluation"):
            fail()
        value, outputs = workload.loss(model, batch, recipe)
        if beyond and where == "backward" and value.requires_grad:
            value.register_hook(fail)
        return value, outputs

    return dataclasses.replace(workload, loss=loss)


@contextlib.contextmanager
def largest_file(size_bytes):
    """No file may become larger inside: writing more fails, as on a full disk."""
    limit = resource.RLIMIT_FSIZE
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))
