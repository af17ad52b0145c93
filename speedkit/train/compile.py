"""torch.compile, applied in place: to the model, to its repeated blocks, or to loss and update."""

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from speedkit.plan import Fallback, Plan
from speedkit.workloads.workload import Loss, Workload

BACKEND = "inductor"
# Graphs of one function: several plans of one model live in a process that measures, with one for each padded length.
# Past the limit dynamo goes on uncompiled.
RECOMPILE_LIMIT = 64
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def apply_compile(model: nn.Module, plan: Plan, workload: Workload | None = None) -> list[Fallback]:
    """Compile `model`, or each of its repeated blocks, in place: names in the state dict do not change.

    Blocks of one class and shape share one graph, so compiling them costs a fraction of compiling the model. Under
    scope "step" the loss is compiled with the model in it, see `compile_loss`.
    """
    if plan.compile == "off" or plan.compile_scope == "step":
        return []
    modules, fallbacks = [model], list[Fallback]()
    if plan.compile_scope == "blocks":
        modules = [block for _, block in repeated_blocks(model)] or [model]
    if plan.compile_scope == "blocks" and modules == [model]:
        why = f"{type(model).__name__} has no class of blocks twice, whose code could be used again"
        fallbacks.append(Fallback("compile_scope", "blocks", "model", why))
    for module in modules:
        compile_in_place(module, **compile_options(plan, workload))
    return fallbacks


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile `module` as `nn.Module.compile` does, also where its forward pass is PyTorch's own.

    As the outermost call dynamo skips code of PyTorch's, so that nothing of a Sequential of layers would be compiled.
    """
    if not type(module).__module__.startswith("torch."):
        module.compile(**options)
        return

    def call(*inputs: Any, **named: Any) -> Any:
        return module._call_impl(*inputs, **named)

    module._compiled_call_impl = torch.compile(call, **options)


def compile_loss(loss: Loss, plan: Plan, workload: Workload | None = None) -> Loss:
    """Return `loss`, under scope "step" compiled together with the model that it calls."""
    if plan.compile == "off" or plan.compile_scope != "step":
        return loss
    return torch.compile(loss, **compile_options(plan, workload))


def compile_update(optimizer: torch.optim.Optimizer, plan: Plan, say: Callable[[str], Any]) -> None:
    """Compile the step of `optimizer` in place, where `compiles_update`; its learning rate must be a tensor.

    A number would be compiled in, and anew whenever the schedule moves it. Where compiling fails, the plain step is
    made from then on, and `say` is told why.
    """
    if not compiles_update(plan):
        return
    plain = optimizer.step
    # Without what torch wraps the step in it is one graph, and nothing of a graph that fails to compile has run.
    whole = inspect.unwrap(type(optimizer).step)
    compiled = torch.no_grad()(torch.compile(whole, fullgraph=True, dynamic=False, backend=BACKEND, mode=plan.compile))

    def step() -> None:
        try:
            compiled(optimizer)
        except Exception as error:
            optimizer.step = plain  # type: ignore[method-assign]
            say(f"compile: the update stays plain, {failure(error)}")
            plain()

    optimizer.step = step  # type: ignore[assignment,method-assign]


def compiles_update(plan: Plan) -> bool:
    """Whether the optimizer's update is compiled. A fused one is a single kernel already."""
    return plan.compile != "off" and plan.compile_scope == "step" and not plan.fused_optimizer


def remove_compile(model: nn.Module) -> None:
    """Let `model` and its blocks run eagerly from now on."""
    for module in model.modules():
        module._compiled_call_impl = None


def compile_options(plan: Plan, workload: Workload | None = None) -> dict[str, Any]:
    """Return what torch.compile takes: fixed shapes, but where batches come in any length a second graph for all."""
    # A CUDA compiler without a GPU is no news to somebody who trains on a CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    if workload is None or workload.length is None or plan.bucket:
        return {"backend": BACKEND, "mode": plan.compile, "dynamic": False}
    # On a CPU Inductor stores what convolutions come from or lead to as NHWC, attention's heads too. AOTAutograd hands
    # such changed strides to the backward pass as numbers, those of the length that was traced: any other length ends
    # in an AssertionError. On CUDA dynamic shapes keep their layout (https://github.com/pytorch/pytorch/pull/99773,
    # https://github.com/pytorch/pytorch/issues/102670).
    options = torch._inductor.list_mode_options(plan.compile) | {"layout_optimization": False}
    return {"backend": BACKEND, "options": options, "dynamic": None}


def failure(error: BaseException) -> str:
    """Return in a few words what went wrong; what follows in the text are commands, stacks and advice."""
    first = " ".join(str(error).split("\n\n")[0].split())
    return f"{type(error).__name__}: {first[:300]}".removesuffix(": ")


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the repeated blocks of `model`, none inside another, in its order.

    A block has parameters, has children, is no plain container, and is of a class that `model` holds more than once.
    """
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if [*module.children()] and [*module.parameters()] and type(module) not in CONTAINERS
    ]
    count = Counter(type(module) for _, module in candidates)
    blocks: list[tuple[str, nn.Module]] = []
    for name, module in candidates:  # outer ones come first
        inside = any(name.startswith(f"{outer}.") for outer, _ in blocks)
        if name and count[type(module)] > 1 and not inside:
            blocks.append((name, module))
    return blocks
