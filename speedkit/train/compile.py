"""torch.compile, applied in place: to the model, or to its repeated blocks."""

import contextlib
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import nn

from speedkit.plan import TUNED, Plan
from speedkit.workload import Workload

BACKEND = "inductor"
# Graphs of one function: several plans of one model live in a process that measures, with one for each padded length.
# Past the limit dynamo goes on uncompiled.
RECOMPILE_LIMIT = 64
COMPILING_S = defaultdict(lambda: 25.0, cpu=45.0)  # of a model, about: on two cores 13 to 60
MOST_SAVED = 1 - 1 / 1.3  # of a step's time
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def apply_compile(model: nn.Module, plan: Plan, workload: Workload | None = None) -> str:
    """Compile `model`, or each of its repeated blocks, in place; return "" or why it is not the blocks.

    Names in the state dict do not change. Blocks of one class and shape share one graph, so compiling them costs a
    fraction of compiling the model.
    """
    if plan.compile == "off":
        return ""
    blocks = repeated_blocks(model) if plan.compile_scope == "blocks" else []
    for module in blocks or [model]:
        # As the outermost call dynamo skips PyTorch's own code: nothing of a plain Sequential would be compiled.
        with torch._dynamo.config.patch(wrap_top_frame=type(module).__module__.startswith("torch.")):
            module.compile(**_options(plan, workload, on_gpu=any(weight.is_cuda for weight in model.parameters())))
    if plan.compile_scope == "blocks" and not blocks:
        return f"{type(model).__name__} has no class of blocks twice, whose code could be used again"
    return ""


def recompile_limit_kept(plan: Plan) -> contextlib.AbstractContextManager:
    """Return the context that puts dynamo's limit of graphs back, if the plan compiles and so raises it."""
    if plan.compile == "off":
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit)


def remove_compile(model: nn.Module) -> None:
    """Let `model` and its blocks run eagerly from now on."""
    for module in model.modules():
        module._compiled_call_impl = None


def _options(plan: Plan, workload: Workload | None, *, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of torch.compile: fixed shapes, but a second graph for all the others where lengths differ.

    Of the few of buckets each gets a graph, but in blocks, whose point is little to compile.
    """
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    options: dict[str, Any] = {"backend": BACKEND, "mode": plan.compile}
    if workload is None or workload.own_loader is not None:  # somebody's own batches, of unknown shapes
        return options
    fixed = plan.bucket and (plan.compile_scope == "model" or plan.compile in TUNED)
    if workload.length is None or (fixed and not on_gpu):
        return options | {"dynamic": False}
    # On a CPU Inductor stores what convolutions come from or lead to as NHWC, attention's heads too. AOTAutograd hands
    # such changed strides to the backward pass as numbers, those of the length that was traced: any other length ends
    # in an AssertionError. On CUDA dynamic shapes keep their layout (https://github.com/pytorch/pytorch/pull/99773,
    # https://github.com/pytorch/pytorch/issues/102670); fixed ones do not: where rows of attention's mask are padded
    # to a multiple of 8, they are no longer contiguous, and its backward pass raises.
    layout_kept = torch._inductor.list_mode_options(plan.compile) | {"layout_optimization": False}
    return {"backend": BACKEND, "options": layout_kept, "dynamic": False if fixed else None}


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules inside `model` whose class it holds more than once.

    A block has parameters and children, and is no plain container.
    """
    _, *modules = model.modules()
    blocks = [module for module in modules if list(module.children()) and type(module) not in CONTAINERS]
    blocks = [block for block in blocks if list(block.parameters())]
    count = Counter(map(type, blocks))
    repeated = [block for block in blocks if count[type(block)] > 1]
    inside = {inner for block in repeated for inner in block.modules() if inner is not block}
    return [block for block in repeated if block not in inside]


def eager(plan: Plan) -> contextlib.AbstractContextManager:
    """Return the context in which compiled code is not used."""
    return contextlib.nullcontext() if plan.compile == "off" else torch.compiler.set_stance("force_eager")
