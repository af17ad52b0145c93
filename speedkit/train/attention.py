"""Attention kernels: which may run."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from speedkit.plan import Plan
from speedkit.train.compile import repeated_blocks

# In the order in which they stand in for one another; math, which takes everything, last.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
REFUSED_BY_CUDNN = re.compile("cudnn_status|cudnn.?frontend|no execution plans support", re.IGNORECASE)  # in an error


def with_kernel(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Return `function` with the plan's attention kernel, and the others where that one refuses a call."""
    if plan.attention in ("auto", "varlen"):
        return function
    order = dict.fromkeys((plan.attention, *BACKENDS)) if plan.attention != "math" else ["math"]
    # A partial of a bound method is copied along with a model that is deep-copied; a closure would not be.
    return functools.partial(_call, function, [BACKENDS[name] for name in order])


def _call(function: Callable[..., Any], allowed: list[SDPBackend], *args: Any, **kwargs: Any) -> Any:
    with sdpa_kernel(allowed, set_priority=True):
        return function(*args, **kwargs)


def leave_out_cudnn(model: nn.Module) -> None:
    """Let `model` compute no attention by cuDNN any more, nor anything else in the process."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    for module in model.modules():
        forward = module.forward
        if isinstance(forward, functools.partial) and forward.func is _call:
            allowed = forward.args[1]
            allowed[:] = [backend for backend in allowed if backend != SDPBackend.CUDNN_ATTENTION]


def layers_with_lengths(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model` whose attention can be given the lengths of clips: by their attribute `varlen`."""
    return [module for module in model.modules() if hasattr(module, "varlen")]


def apply_attention(model: nn.Module, plan: Plan) -> str:
    """Let `model` use the plan's attention kernel, in place; return "" or why it cannot.

    Where blocks are compiled, each chooses for itself: Dynamo guards a choice only where compiled code makes it.
    """
    if plan.attention == "varlen":
        for layer in (layers := layers_with_lengths(model)):
            layer.varlen = True  # type: ignore[assignment]
        return "" if layers else f"no layer of {type(model).__name__} takes the lengths of clips"
    blocks = repeated_blocks(model) if plan.compile_scope == "blocks" else []
    for module in (model, *blocks):
        if plan.attention != "auto":
            module.forward = with_kernel(module.forward, plan)
    return ""
