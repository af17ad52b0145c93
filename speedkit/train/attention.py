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
# What the profiler calls each, and which of its arguments is the mask.
OPERATIONS: dict[str, tuple[str, int | None]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("flash", 5),
    "aten::_scaled_dot_product_flash_attention": ("flash", None),
    "aten::_scaled_dot_product_efficient_attention": ("efficient", 3),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", 3),
    "aten::_scaled_dot_product_attention_math": ("math", 3),
    "torch_attn::_varlen_attn": ("flash, lengths", None),
}


def backends(plan: Plan) -> list[SDPBackend]:
    """Return the kernels that `plan` allows: the one it names, then those that stand in for it; empty for "auto".

    Where the first refuses a call the others follow, math last; after "math" none does.
    """
    if plan.attention == "auto":
        return []
    first = BACKENDS[plan.attention]
    return [first] if plan.attention == "math" else list(dict.fromkeys((first, *BACKENDS.values())))


def apply_attention(model: nn.Module, plan: Plan) -> None:
    """Let the forward pass of `model` use the plan's kernel first, in place; of each block where these are compiled.

    Dynamo guards the choice only where it is made inside of what is compiled.
    """
    allowed, modules = backends(plan), [model]
    if plan.compile_scope == "blocks":
        modules += [block for _, block in repeated_blocks(model)]
    for module in modules if allowed else ():
        # A partial of a bound method is copied along with a model that is deep-copied; a closure would not be.
        module.forward = functools.partial(call_under, allowed, module.forward)


def call_under(allowed: list[SDPBackend], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `function` does with the kernels `allowed`; an empty list leaves PyTorch its choice."""
    if not allowed:
        return function(*args, **kwargs)
    with sdpa_kernel(allowed, set_priority=True):
        return function(*args, **kwargs)


def which_ran(function: Callable[[], Any]) -> list[dict[str, Any]]:
    """Call `function()`; return {kernel, dtype, query, mask, calls} of each attention kernel that ran.

    The shape `query` is [B, H, T, D]. In compiled code math is no operation of its own, and has no entry.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that there is no GPU to look at is no news
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as run:
        function()
    counts: Counter[tuple[Any, ...]] = Counter()
    profiler: Any = run.profiler
    for event in profiler.kineto_results.events():  # events() of the profile itself has no dtypes
        if event.name() in OPERATIONS:
            (kernel, mask_at), shapes = OPERATIONS[event.name()], [tuple(shape) for shape in event.shapes()]
            dtype = event.dtypes()[0].rpartition("::")[2].lower()
            counts[kernel, dtype, shapes[0], () if mask_at is None else shapes[mask_at]] += 1
    columns = ("kernel", "dtype", "query", "mask", "calls")
    return [dict(zip(columns, (*key, calls), strict=True)) for key, calls in counts.items()]
