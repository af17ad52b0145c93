"""What takes memory, and what can be traded for it."""

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# mallopt's parameters, from glibc's malloc.h; 32 MB is the largest threshold that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 1 << 30, M_TOP_PAD: 64 << 20}


def live_tensors() -> dict[tuple[torch.device, int], Tensor]:
    """Return one tensor per storage that Python can reach, by device and address; views share theirs."""
    # Only plain tensors: those inside a subclass are plain themselves, and a traced one has no storage.
    tensors = (tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, torch.nn.Parameter))
    return {_place(tensor): tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta}


def activation_bytes(function: Callable[[], Any]) -> int:
    """Return the bytes that `function`, a forward pass that returns its loss, leaves behind for the backward pass.

    Counted are distinct storages that autograd saved or that Python came to hold, the result too; not those that were
    there before, as weights and batch are. What a first call sets up (compiled code, tables) counts: call it once
    before. https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-default-hooks
    """
    before = set(live_tensors())
    saved: dict[tuple[torch.device, int], Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[_place(tensor)] = tensor  # held, so that no other tensor gets this address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()  # held: with it goes the graph
    # Selective checkpointing keeps tensors of its own, which the hooks do not see but Python does.
    after = saved | live_tensors()
    del result
    return sum(tensor.untyped_storage().nbytes() for place, tensor in after.items() if place not in before)


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


@functools.lru_cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next tensor instead of returning it to the system; return whether it does.

    By default each step takes thousands of page faults to get its activations' memory again; their cost varies several
    times over on a virtual machine and drowns what is to be measured. It speeds up every plan, the naive one too, so it
    is no part of a plan (man 3 mallopt).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all(mallopt(parameter, value) == 1 for parameter, value in KEPT.items())
