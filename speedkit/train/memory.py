"""What takes memory, and what can be traded for it: recomputing activations, the allocator, what is held and where."""

import ctypes
import functools
import gc
import itertools
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from speedkit import files
from speedkit.plan import Plan
from speedkit.train import attention
from speedkit.train.compile import repeated_blocks

aten = torch.ops.aten
# Products of activations with weights, and attention: most of the time and, beside what lies between them, little of
# the memory. Not bmm: attention spelled out in products keeps its scores, which grow with the square of the length.
KEPT_PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.convolution.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]

# mallopt's parameters, from glibc's malloc.h; 32 MB is the largest threshold that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_FREE = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 1 << 30, M_TOP_PAD: 64 << 20}


def checkpoint_blocks(model: nn.Module, plan: Plan) -> str:
    """Make each repeated block of `model` recompute its activations in the backward pass; return "" or why not.

    "blocks" keeps a block's inputs only; "selective" also the results of its products, so that what is recomputed is
    cheap. Gradients stay the same bits, dropout's included. Evaluation and names in the state_dict do not change.
    Chen et al. 2016; https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    if plan.checkpointing == "off":
        return ""
    blocks = [block for _, block in repeated_blocks(model)]
    if why := _not_to_recompute(model, blocks, plan):
        return why
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT_PRODUCTS)
    options = {"context_fn": contexts} if plan.checkpointing == "selective" else {}
    for block in blocks:
        # A partial of bound methods is copied along with a model that is deep-copied; a closure would not be.
        block.forward = functools.partial(_recomputed, block, block.forward, attention.kernels(plan), options)
    return ""


def _recomputed(block: nn.Module, forward: Any, kernels: Any, options: Any, *inputs: Any, **named: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*inputs, **named)
    # The backward pass runs outside the loop's choice of attention kernels; compiled code has made it for both.
    if kernels is not None and not torch.compiler.is_compiling():
        forward = kernels(forward)
    return checkpoint(forward, *inputs, use_reentrant=False, **options, **named)


def _not_to_recompute(model: nn.Module, blocks: list[nn.Module], plan: Plan) -> str:
    """Return why `blocks` cannot run twice with the same result, "" where they can."""
    if not blocks:
        return f"{type(model).__name__} has no repeated blocks: no class of modules with children occurs twice in it"
    for block in blocks:
        for before, module in itertools.pairwise([None, *block.modules()]):
            if getattr(module, "track_running_stats", False):
                return (
                    f"{type(block).__name__} holds {type(module).__name__}, whose running statistics a second "
                    "forward pass would move once more: normalise per group or layer"
                )
            overwrites = getattr(module, "inplace", False) and isinstance(before, nn.Linear | nn.modules.conv._ConvNd)
            if overwrites and plan.checkpointing == "selective":
                return (
                    f"{type(block).__name__} holds an in-place {type(module).__name__}, which would overwrite what "
                    f'is kept of {type(before).__name__}: leave inplace off, or use "blocks"'
                )
    return ""


def live_tensors() -> dict[tuple[torch.device, int], Tensor]:
    """Return one tensor per storage that Python can reach, by device and address; views share theirs."""
    # Only plain tensors: those inside a subclass are plain themselves, and a traced one has no storage.
    tensors = (tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter))
    return {_place(tensor): tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta}


def activation_bytes(function: Callable[[], Any]) -> int:
    """Return the bytes that `function`, a forward pass that returns its loss, leaves behind for the backward pass.

    Counted are distinct storages that autograd saved or that Python came to hold, the result too; not those that were
    there before. What a first call sets up (compiled code, tables) counts: call it once before.
    https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-default-hooks
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


def set_allocator(plan: Plan, device: torch.device) -> str:
    """Set how CUDA's caching allocator maps memory from now on, for the whole process; return "" or why it did not.

    "expandable" grows segments instead of adding new ones, so that batches of many sizes leave fewer holes
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
    """
    if plan.allocator == "default" or device.type != "cuda":
        return ""
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return f"the allocator is {backend}, which has no segments: unset PYTORCH_ALLOC_CONF"
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = ",".join(filter(None, (asked, "expandable_segments:True")))  # what is not named again would be reset
    torch._C._accelerator_setAllocatorSettings(settings)
    # Not every driver and platform can do it, so ask for more than lies in any hole and see where it was put.
    torch.cuda.empty_cache()
    probe = torch.empty(fragmentation(device)["largest_free_block_bytes"] + (2 << 20), dtype=torch.uint8, device=device)
    grows = any(
        segment["is_expandable"]
        for segment in torch.cuda.memory_snapshot()
        if 0 <= probe.data_ptr() - segment["address"] < segment["total_size"]
    )
    return "" if grows else "this driver or platform maps no expandable segments"


def fragmentation(device: torch.device) -> dict[str, Any]:
    """Return what the allocator holds and how much of it is in use: of a GPU's memory, or of this process's RAM.

    `free_share` is the part of what is reserved on a GPU that no tensor uses; a request larger than
    `largest_free_block_bytes` needs new memory all the same.
    """
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"rss_bytes": psutil.Process().memory_info().rss, "peak_rss_bytes": peak}
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["device"] == (device.index or 0) and block["state"] == "inactive"
    ]
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "free_share": 1 - allocated / max(reserved, 1),
        "largest_free_block_bytes": max(free, default=0),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def save_snapshot(folder: str | Path, device: torch.device) -> Path | None:
    """Write what takes memory now to memory.json in `folder`; return its path, or None where it cannot be written.

    It lists the largest tensors that Python can reach, by shape. On a GPU memory.pickle comes with it, for
    https://docs.pytorch.org/memory_viz; the first one switches on the record of where memory is asked for, some
    microseconds each time, so that the next one names the lines.
    """
    held = Counter(
        (tensor.untyped_storage().nbytes(), str(tensor.device), str(tensor.dtype), tuple(tensor.shape))
        for tensor in live_tensors().values()
    )
    rows = [
        {"bytes": kind[0], "device": kind[1], "dtype": kind[2], "shape": kind[3], "count": count}
        for kind, count in sorted(held.items(), key=lambda row: -row[0][0] * row[1])[:50]
    ]
    path = Path(folder) / "memory.json"
    try:
        files.write_json(path, {"device": str(device), **fragmentation(device), "largest": rows})
        if device.type == "cuda":
            with files.atomic(path.with_suffix(".pickle")) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)
    except OSError:
        return None
    return path


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


@functools.lru_cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next tensor instead of returning it to the system; return whether it does.

    By default each step takes thousands of page faults to get it back, whose cost varies several times over on a
    virtual machine. It speeds up every plan, the naive one too, so it is no part of a plan (man 3 mallopt).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all(mallopt(parameter, value) == 1 for parameter, value in KEPT_FREE.items())
