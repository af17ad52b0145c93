"""What takes memory, and what can be traded for it: recomputation, and how it is handed out."""

import ctypes
import functools
import gc
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from speedkit.plan import Plan
from speedkit.train.attention import with_kernel
from speedkit.train.compile import repeated_blocks

# Products of activations with weights, and attention: most of the time and, beside what lies between them, little of
# the memory. Not bmm: attention spelled out in products keeps its scores, which grow with the square of the length.
ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
KEPT_PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "convolution", "_scaled_mm", *(f"_scaled_dot_product_{kind}" for kind in ATTENTION))
]
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
# What RuntimeErrors say that a smaller batch cures; the last is oneDNN's. What cuDNN does not support, it never will.
OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|std::bad_alloc|_ALLOC_FAILED|cudaErrorMemoryAllocation|"
    "could not create a primitive"
)


def checkpoint_blocks(model: nn.Module, plan: Plan) -> str:
    """Make each repeated block of `model` recompute its activations in the backward pass; return "" or why not.

    "blocks" keeps a block's inputs only; "selective" also the results of its products, so that recomputing is cheap.
    Gradients stay the same bits, dropout's included. Evaluation and names in the state_dict do not change.
    Chen et al. 2016; https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    if plan.checkpointing == "off":
        return ""
    blocks = repeated_blocks(model)
    if not blocks:
        return f"{type(model).__name__} has no repeated blocks: no class of modules with children occurs twice in it"
    for module in nn.ModuleList(blocks).modules():
        if getattr(module, "track_running_stats", False):
            return f"a second forward pass would move the running statistics of a block's {type(module).__name__}"
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT_PRODUCTS)
    options = {"context_fn": contexts} if plan.checkpointing == "selective" else {}
    for block in blocks:
        # A partial of a bound method is copied along with a model that is deep-copied; a closure would not be.
        block.forward = functools.partial(_recomputed, block, block.forward, plan=plan, options=options)
    return ""


def _recomputed(block: nn.Module, forward: Any, *inputs: Any, plan: Plan, options: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    # The backward pass runs outside the model's choice of attention kernels; compiled code has made it for both.
    if not torch.compiler.is_compiling():
        forward = with_kernel(forward, plan)
    return checkpoint(forward, *inputs, use_reentrant=False, **options, **named)


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that `function()` has allocated at any time, beside those allocated before."""
    return max(allocated_bytes(function, device))


def allocated_bytes(function: Callable[[], Any], device: torch.device) -> list[int]:
    """Return the bytes that `function()` has allocated: over time, the last while its result is still held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _result = function()  # held until here returns
        return [torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no message on machines without a GPU
    with profile(profile_memory=True) as run:
        _result = function()
    events = sorted(run.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    allocated = [0]
    for event in events:
        if event.name() == "[memory]":
            allocated.append(allocated[-1] + event.nbytes())
    return allocated


def set_allocator(plan: Plan, device: torch.device) -> None:
    """Set how memory is handed out from now on, for the whole process; nothing sets it back.

    "expandable": CUDA's caching allocator grows segments instead of adding new ones, so that batches of many sizes
    leave fewer holes
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
    "keep": glibc keeps freed memory for the next tensor instead of returning it to the system, from which each step
    would get it back by thousands of page faults (man 3 mallopt).
    """
    if plan.allocator == "keep":
        c_library = ctypes.CDLL(None)
        c_library.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        c_library.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        c_library.mallopt(M_TOP_PAD, 64 << 20)
    if plan.allocator == "expandable" and device.type == "cuda":
        # Settings of the environment that are not named again would be reset.
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, "expandable_segments:True"))))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a smaller batch could have fitted."""
    said = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    return said or isinstance(error, MemoryError)


def release(device: torch.device) -> None:
    """Free what a failed step left behind. Call it outside `except`: there the error still holds its frames."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
