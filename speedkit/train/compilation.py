"""torch.compile, applied to the model."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from speedkit.plan import Plan


def apply(model: nn.Module, plan: Plan) -> Callable[..., Tensor]:
    """Return what the training step calls in place of `model`: itself, or its compiled form.

    Shapes are compiled as fixed: the loop sends a smaller batch through the plain model.
    """
    if plan.compile == "off":
        return model
    # A CUDA compiler without a GPU is no news to somebody who trains on a CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Several plans' graphs of one model live in a process that measures; past the limit dynamo goes on uncompiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(model, mode=plan.compile, dynamic=False)
