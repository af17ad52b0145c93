"""torch.compile, applied to the model, to its repeated blocks or to the whole step"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.plan import EffectivePlan, Fallback, Plan
from speedkit.train import attention
from speedkit.train.blocks import repeated_blocks

BACKEND = "inductor"
# Graphs of one function: several plans of one model live in a process that measures, with one for each padded length.
# Past the limit dynamo goes on uncompiled.
RECOMPILE_LIMIT = 64
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes that replay them

Loss = Callable[[Any, tuple[Tensor, ...], Any], tuple[Tensor, Tensor]]


class Compiled:
    """The model as a training step calls it: compiled, until a compilation fails.

    `model` itself stays plain, for evaluation and for an epoch's last, smaller batch: each would be compiled for anew.
    """

    def __init__(self, model: nn.Module, plan: Plan, options: dict[str, Any]):
        self.model, self.plan, self.options = model, plan, options
        self.cuda_graphs = plan.compile in CUDA_GRAPHS and next(model.parameters()).is_cuda
        self.parts = 0  # forward passes that gradients are being added up from
        self.failed = False
        self.fallbacks: list[Fallback] = []
        blocks = [block for _, block in repeated_blocks(model)] if plan.compile_scope == "blocks" else []
        if plan.compile_scope == "blocks" and not blocks:
            why = f"{type(model).__name__} has no class of blocks twice, whose code could be used again"
            self.fallbacks.append(Fallback("compile_scope", "blocks", "model", why))
        # Blocks of one class and shape share what the first of them compiles: weights are inputs of a graph.
        self.blocks = [(block, _compiled(block._call_impl, plan, options)) for block in blocks]
        self.whole = None if blocks else _compiled(model, plan, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `model` returns."""
        if self.failed:
            return self.model(*args, **kwargs)
        self.begin_part()
        if self.whole is not None:
            return self.whole(*args, **kwargs)
        try:
            for block, compiled in self.blocks:
                block.__dict__["_compiled_call_impl"] = compiled  # as nn.Module.compile does, but for this call alone
            return self.model(*args, **kwargs)
        finally:
            for block, _ in self.blocks:
                block.__dict__["_compiled_call_impl"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def begin_part(self) -> None:
        """Let CUDA graphs write again to the memory of the forward and backward pass before this one.

        The gradients that those of this part are added to lie there. They are copied out: accumulation would silently
        be wrong otherwise (https://github.com/pytorch/pytorch/issues/169545).
        """
        if not self.cuda_graphs:
            return
        gradients = {parameter: parameter.grad for parameter in self.model.parameters() if parameter.grad is not None}
        self.parts = self.parts + 1 if gradients else 0
        if self.parts == 1:  # those of later parts are added to the copies
            for parameter, gradient in gradients.items():
                parameter.grad = gradient.clone()
        torch.compiler.cudagraph_mark_step_begin()


def apply(model: nn.Module, plan: Plan, workload: Any = None) -> nn.Module | Compiled:
    """Return what the training step calls in place of `model`: itself, or its compiled form."""
    if plan.compile == "off":
        return model
    # A CUDA compiler without a GPU is no news to somebody who trains on a CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    return Compiled(model, plan, _options(plan, workload))


def _options(plan: Plan, workload: Any) -> dict[str, Any]:
    """Return what torch.compile takes: fixed shapes, but where batches come in any length a second graph for all."""
    if workload is None or workload.length is None or plan.bucket:
        return {"backend": BACKEND, "mode": plan.compile, "dynamic": False}
    # On a CPU Inductor stores what convolutions lead to or come from as NHWC, the heads of attention too, and AOTAutograd
    # hands strides that it so changed to the backward pass as numbers: those of the length that was traced. Any other
    # length ends in an AssertionError. On CUDA layouts are left alone where shapes are dynamic
    # (https://github.com/pytorch/pytorch/pull/99773, https://github.com/pytorch/pytorch/issues/102670).
    options = torch._inductor.list_mode_options(plan.compile) | {"layout_optimization": False}
    return {"backend": BACKEND, "options": options, "dynamic": None}


def _compiled(function: Callable[..., Any], plan: Plan, options: dict[str, Any]) -> Callable[..., Any]:
    # Code keeps the attention kernel it was traced with; only a choice made inside of it is guarded by dynamo.
    under = attention.kernels(plan)
    return torch.compile(function if under is None else under(function), **options)


def loss(function: Loss, plan: Plan, workload: Any = None) -> Loss:
    """Return `function`, or under scope "step" what compiles it with the model; given the plain model, it is itself."""
    if plan.compile == "off" or plan.compile_scope != "step":
        return function

    compiled = _compiled(function, plan, _options(plan, workload))

    @functools.wraps(function)
    def compiled_for_training(model: Any, batch: tuple[Tensor, ...], recipe: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(model, Compiled) or model.failed:
            return function(model, batch, recipe)
        model.begin_part()
        value, outputs = compiled(model.model, batch, recipe)
        # Losses are kept until the host reads them: not in memory that the next replay of a CUDA graph writes to.
        return (value.clone() if model.cuda_graphs else value), outputs

    return compiled_for_training


def compiles_update(plan: Plan) -> bool:
    """Whether the optimizer's update is compiled. A fused one is a single kernel already, which torch leaves alone."""
    return plan.compile != "off" and plan.compile_scope == "step" and not plan.fused_optimizer


def update(forward: nn.Module | Compiled, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the optimizer's step, compiled where `compiles_update`: its learning rate must be a tensor then.

    A number would be compiled in, and anew whenever the schedule moves it.
    """
    if not isinstance(forward, Compiled) or not compiles_update(forward.plan):
        return optimizer.step
    # Without what torch wraps it in it is one graph, whose failure to compile leaves all as it was.
    plain = inspect.unwrap(type(optimizer).step)
    compiled = torch.compile(plain, fullgraph=True, **forward.options | {"dynamic": False})
    hooked = torch.optim.Optimizer.profile_hook_step(torch.no_grad()(compiled))
    return lambda: optimizer.step() if forward.failed else hooked(optimizer)


def gave_up(forward: nn.Module | Compiled, error: BaseException) -> str:
    """Return the reason, and call nothing compiled from now on, where `error` is a failure to compile; "" elsewhere.

    It may come in the first forward or backward pass, and wherever a shape is new. Nothing of the graph in question has
    run: the step can be repeated from the state before it.
    """
    if not isinstance(forward, Compiled) or forward.failed:
        return ""
    if not isinstance(error, torch._dynamo.exc.TorchDynamoException | torch._dynamo.exc.FailOnRecompileLimitHit):
        return ""
    forward.failed = True
    first = " ".join(str(error).split("\n\n")[0].split())  # what follows are commands, stacks and advice
    why = f"compilation failed: {first[:300] or type(error).__name__}"
    forward.fallbacks.append(Fallback("compile", forward.plan.compile, "off", why))
    return why


def honoured(effective: EffectivePlan, forward: nn.Module | Compiled) -> EffectivePlan:
    """Return `effective` with what only compiling could tell: whether there are blocks, and whether it failed."""
    fallbacks = forward.fallbacks if isinstance(forward, Compiled) else []
    return effective.with_fallbacks(*(new for new in fallbacks if new not in effective.fallbacks))
