"""Attention kernels: which may run, which really ran and why, and padded batches without a mask of [T, T]."""

import contextlib
import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from speedkit.plan import Plan

# In the order in which they stand in for one another; math, which takes everything, last.
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# What the profiler calls each, and which of its arguments is the mask.
OPERATIONS: dict[str, tuple[str, int | None]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("flash", 5),
    "aten::_scaled_dot_product_flash_attention": ("flash", None),
    "aten::_scaled_dot_product_efficient_attention": ("efficient", 3),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", 3),
    "aten::_scaled_dot_product_attention_math": ("math", 3),
    "torch_attn::_varlen_attn": ("flash, lengths", None),
}
DTYPES = {"float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16"}


def kernels(plan: Plan) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return a decorator that lets a function use the plan's attention kernel first; None where it asks for no one.

    Where that kernel refuses a call the others follow, math last; after "math" none does. Dynamo guards this choice
    only where it is made inside of what is compiled: so compile `kernels(plan)(model)`, not the model. What the
    backward pass recomputes runs outside of it too: wrap that as well.
    """
    if plan.attention == "auto":
        return None
    asked = KERNELS[plan.attention]
    order = [asked] if plan.attention == "math" else list(dict.fromkeys((asked, *KERNELS.values())))
    return sdpa_kernel(order, set_priority=True)


def apply_attention(model: nn.Module, plan: Plan) -> None:
    """Let the forward pass of `model` use the plan's attention kernel first, in place.

    Where that kernel refuses a call the others follow, math last; after "math" none does. The choice is made inside of
    what is compiled: only there dynamo guards it.
    """
    if plan.attention == "auto":
        return
    first = KERNELS[plan.attention]
    backends = [first] if plan.attention == "math" else list(dict.fromkeys((first, *KERNELS.values())))
    # A partial of a bound method is copied along with a model that is deep-copied; a closure would not be.
    model.forward = functools.partial(_forward_with, backends, model.forward)


def _forward_with(backends: list[SDPBackend], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(backends, set_priority=True):
        return forward(*args, **kwargs)


def which_ran(function: Callable[[], Any]) -> list[dict[str, Any]]:
    """Call `function()`; return which attention kernels really ran, one row per kernel, dtype and shapes with `calls`.

    `query` and `key` are [B, H, T, D]; `why` tells for math what kept the others from running, for which `function` is
    called once more. Compiled code has no operation for math, so no row of it; call it before, for tracing would count.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that there is no GPU to look at is no news
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as run:
        function()
    counts: Counter[tuple[Any, ...]] = Counter()
    profiler: Any = run.profiler
    for event in profiler.kineto_results.events():  # events() of the profile itself has no dtypes
        if event.name() in OPERATIONS:
            (name, mask_at), shapes = OPERATIONS[event.name()], [tuple(shape) for shape in event.shapes()]
            mask = shapes[mask_at] if mask_at is not None else ()
            counts[name, DTYPES.get(event.dtypes()[0], event.dtypes()[0]), shapes[0], shapes[1], mask] += 1
    explain = _Explain()
    if any(name == "math" for name, *_ in counts):
        with explain:
            function()
    columns = ("kernel", "dtype", "query", "key", "mask")
    return [
        {
            **dict(zip(columns, row, strict=True)),
            "calls": calls,
            "why": explain.whys.get(row[2:], "") if row[0] == "math" else "",
        }
        for row, calls in counts.items()
    ]


class _Explain(TorchFunctionMode):
    """Finds out, of every attention call that it sees, why no kernel but math takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.whys: dict[tuple[Any, ...], str] = {}  # by the shapes of query, key and mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            tensors = (given["query"], given["key"], given.get("attn_mask"))
            shapes = tuple(() if tensor is None else tuple(tensor.shape) for tensor in tensors)
            self.whys[shapes] = self.whys.get(shapes) or _refusals(*args, **kwargs)
        return func(*args, **kwargs)


def _refusals(*args: Any, **options: Any) -> str:
    """Return PyTorch's reasons for letting none of the kernels before math run on these arguments."""
    allowed = torch.nn.attention._cur_sdpa_kernel_backends()
    fused = [kernel for name, kernel in KERNELS.items() if name != "math" and kernel in allowed]
    if not fused:
        return "no other kernel was allowed"
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(fused), contextlib.suppress(RuntimeError):
        warnings.simplefilter("always")
        F.scaled_dot_product_attention(*args, **options)
    said = " ".join(dict.fromkeys(str(warning.message).split(" (Triggered")[0] for warning in caught))
    # The one refusal of PyTorch 2.11 on a CPU that comes without a reason.
    return f"{said} the mask needs a gradient, perhaps" if said.endswith("because:") else said


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Return the attention [B, H, T, D] within each clip's first `lengths` [B] steps; what lies beyond is of no use.

    In 16 bits on CUDA each clip and each clip's padding are sequences of their own to the flash kernel: no mask, no
    host sync. Elsewhere a mask of keys [B, 1, 1, T] is broadcast, which flash takes on a CPU.
    """
    batch, heads, steps, width = query.shape
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        starts = torch.arange(0, batch * steps, steps, device=lengths.device)
        ends = torch.stack((starts, starts + lengths), 1).flatten()  # [2B]: where clips and paddings begin
        bounds = F.pad(ends, (0, 1), value=batch * steps).int()
        packed = [x.transpose(1, 2).reshape(-1, heads, width) for x in (query, key, value)]  # [B * T, H, D]
        mixed: Any = varlen_attn(packed[0], packed[1], packed[2], bounds, bounds, steps, steps)
        return mixed.view(batch, steps, heads, width).transpose(1, 2)
    valid = torch.arange(steps, device=lengths.device) < lengths[:, None]  # [B, T]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=valid[:, None, None])
