"""Attention kernels: which may run, and which really ran."""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from speedkit.plan import Plan
from speedkit.train.compile import repeated_blocks

# In the order in which they stand in for one another; math, which takes everything, last.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# The profiler's name of each operation: its kernel, and which of its arguments is the mask.
OPERATIONS: dict[str, tuple[str, int | None]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("flash", 5),
    "aten::_scaled_dot_product_flash_attention": ("flash", None),
    "aten::_scaled_dot_product_efficient_attention": ("efficient", 3),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", 3),
    "aten::_scaled_dot_product_attention_math": ("math", 3),
    "torch_attn::_varlen_attn": ("flash, lengths", None),
}


def with_kernel(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return `function` with the plan's attention kernel, and the others where that one refuses a call."""
    if plan.attention == "auto":
        return function
    first = BACKENDS[plan.attention]
    allowed = [first] if plan.attention == "math" else list(dict.fromkeys((first, *BACKENDS.values())))
    # A partial of a bound method is copied along with a model that is deep-copied; a closure would not be.
    return functools.partial(_call, function, allowed)


def _call(function: Callable[..., Any], allowed: list[SDPBackend], *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(allowed, set_priority=True):
        return function(*args, **kwargs)


def apply_attention(model: nn.Module, plan: Plan) -> None:
    """Let the forward pass of `model` use the plan's kernel, in place; that of each block where these are compiled.

    Dynamo guards the choice only where it is made inside the compiled code.
    """
    if plan.attention == "auto":
        return
    blocks = repeated_blocks(model) if plan.compile_scope == "blocks" else []
    for module in (model, *blocks):
        module.forward = with_kernel(module.forward, plan)


def which_ran(function: Callable[[], Any]) -> list[dict[str, Any]]:
    """Call `function()`; return {kernel, dtype, query, mask, calls} of each attention kernel that ran.

    The shape `query` is [B, H, T, D]. In compiled code math is no operation of its own, and has no entry.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no message on machines without a GPU
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as run:
        function()
    counts: Counter[tuple[Any, ...]] = Counter()
    for event in run.profiler.kineto_results.events():  # type: ignore[union-attr]  # events() of `run` has no dtypes
        if event.name() in OPERATIONS:
            (kernel, mask_at), shapes = OPERATIONS[event.name()], [tuple(shape) for shape in event.shapes()]
            dtype = event.dtypes()[0].rpartition("::")[2].lower()
            counts[kernel, dtype, shapes[0], () if mask_at is None else shapes[mask_at]] += 1
    columns = ("kernel", "dtype", "query", "mask", "calls")
    return [dict(zip(columns, (*key, calls), strict=True)) for key, calls in counts.items()]
