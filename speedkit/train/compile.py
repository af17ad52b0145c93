"""torch.compile, applied in place: to the model, to its repeated blocks, or to a whole step."""

import dataclasses
import itertools
import logging
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adam import adam

from speedkit.plan import CUDA_GRAPHS, Plan
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Loss, Workload

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # on a CPU it would complain of a GPU's compiler
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
    fraction of compiling the model. Scope "step" is left to `compile_step`.
    """
    if plan.compile == "off" or plan.compile_scope == "step":
        return ""
    blocks = repeated_blocks(model) if plan.compile_scope == "blocks" else []
    for module in blocks or [model]:
        # As the outermost call dynamo skips PyTorch's own code: nothing of a plain Sequential would be compiled.
        with torch._dynamo.config.patch(wrap_top_frame=type(module).__module__.startswith("torch.")):
            module.compile(**_options(plan, workload))
    if plan.compile_scope == "blocks" and not blocks:
        return f"{type(model).__name__} has no class of blocks twice, whose code could be used again"
    return ""


def compile_step(workload: Workload, optimizer: torch.optim.Optimizer, plan: Plan) -> Loss:
    """Return the loss; under scope "step" one that makes its step too, and whose results need no gradient.

    Forward and backward pass, clipping, and the update of AdamW are one graph. Gradients are clipped where the update
    reads them.
    """
    if plan.compile == "off" or plan.compile_scope != "step":
        return workload.loss
    torch._dynamo.config.trace_autograd_ops = True
    (group,) = optimizer.param_groups
    weights, rate = [weight for weight in group["params"] if weight.requires_grad], group["lr"]
    group["capturable"] = rate.is_cuda  # steps are counted on the device
    for weight in weights:  # as the first step would, which then is in the same graph
        averages = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = averages | {"step": torch.zeros_like(rate)}
    options = {name: value for name, value in group.items() if name not in ("params", "betas")}
    options["beta1"], options["beta2"] = group["betas"]

    def graph(state: list[list[Tensor]], model: nn.Module, batch: Batch, *, recipe: Recipe) -> tuple[Tensor, Tensor]:
        loss, outputs = workload.loss(model, batch, recipe)
        with torch.autocast(loss.device.type, enabled=False):
            gradients = list(torch.autograd.grad(loss, weights))
            if recipe.clip_norm is not None:
                scale = recipe.clip_norm / (get_total_norm(gradients) + 1e-6)
                torch._foreach_mul_(gradients, scale.clamp(max=1.0))
            with torch.no_grad():
                averages, squares, counts = state
                adam(weights, gradients, averages, squares, [], counts, **options)
        return loss.detach(), outputs.detach()

    compiled = torch.compile(graph, **_options(plan, workload))

    def step(model: nn.Module, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
        # Anew at each step, for loading a checkpoint makes others.
        lists = [[optimizer.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq", "step")]
        for tensor in (rate, *weights, *itertools.chain(*lists)):
            torch._dynamo.mark_static_address(tensor)  # a CUDA graph then writes there, and not into a copy
        loss, outputs = compiled(lists, model, batch, recipe=recipe)
        return loss.clone() if plan.compile in CUDA_GRAPHS else loss, outputs  # log points read it after more replays

    return step


def compile_augment(workload: Workload, plan: Plan, device: torch.device) -> Workload:
    """Return `workload`, under scope "step" on a GPU with its augmentation compiled: few kernels for dozens small ones.

    Draws stay as they are: Dynamo takes no generator. On a CPU PyTorch's own kernels were two to four times as fast.
    CUDA graphs are left out: their next replay would write over a batch that a step may have to be repeated with.
    """
    if plan.compile == "off" or plan.compile_scope != "step" or device.type == "cpu" or workload.augment is None:
        return workload
    return dataclasses.replace(workload, augment=torch.compile(workload.augment, backend=BACKEND))


def remove_compile(model: nn.Module) -> None:
    """Let `model` and its blocks run eagerly from now on."""
    for module in model.modules():
        module._compiled_call_impl = None


def _options(plan: Plan, workload: Workload | None) -> dict[str, Any]:
    """Return the arguments of torch.compile: fixed shapes, but a second graph where lengths differ without buckets."""
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    if workload is None or workload.own_loader is not None:  # somebody's own batches, of unknown shapes
        return {"backend": BACKEND, "mode": plan.compile}
    if workload.length is None or plan.bucket:
        return {"backend": BACKEND, "mode": plan.compile, "dynamic": False}
    # On a CPU Inductor stores what convolutions come from or lead to as NHWC, attention's heads too. AOTAutograd hands
    # such changed strides to the backward pass as numbers, those of the length that was traced: any other length ends
    # in an AssertionError. On CUDA dynamic shapes keep their layout (https://github.com/pytorch/pytorch/pull/99773,
    # https://github.com/pytorch/pytorch/issues/102670).
    options = torch._inductor.list_mode_options(plan.compile) | {"layout_optimization": False}
    return {"backend": BACKEND, "options": options, "dynamic": None}


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
