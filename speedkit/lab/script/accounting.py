"""What the time of a script's loop counts as, where a profile of the loop alone would take it for something else."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.measure.profile import LoopProfile
from speedkit.measure.timeline import AFTER_FORWARD, CHECKPOINT, FORWARD, OPTIMIZER, Timeline

CHECKPOINTS = {  # what makes one, beside torch.save: module, and name in it
    "lightning.pytorch": "Trainer.save_checkpoint",
    "pytorch_lightning": "Trainer.save_checkpoint",
    "transformers.trainer": "Trainer._save_checkpoint",
    "accelerate": "Accelerator.save_state",
}
Call = Callable[..., Any]


def install(loop: LoopProfile, optimizers: set[Optimizer], stack: contextlib.ExitStack) -> None:
    """See everything that a script's loop does, with all its `optimizers`, until `stack` is closed."""
    calls = [model._compiled_call_impl or model._call_impl for model in loop.models]
    loop.install(stack)
    for model, call in zip(loop.models, calls, strict=True):
        count_acting_as_forward(model, call, loop.timeline)
        if getattr(model, "automatic_optimization", False):  # Lightning calls it inside of the optimizer's step
            step: Any = model.training_step
            stack.enter_context(patch.object(model, "training_step", loop.timeline.timed(AFTER_FORWARD, step)))
    for optimizer in optimizers - {loop.optimizer}:
        stack.callback(optimizer.register_step_pre_hook(lambda *_: loop.timeline.begin(OPTIMIZER)).remove)
        stack.callback(optimizer.register_step_post_hook(lambda *_: loop.timeline.end()).remove)
    for module in CHECKPOINTS.keys() & sys.modules.keys():
        owner, name = CHECKPOINTS[module].split(".")
        saver = getattr(sys.modules[module], owner, None)  # what a package imports late is used by nobody yet
        if saver is not None:  # it gathers, names, writes and deletes
            stack.enter_context(patch.object(saver, name, loop.timeline.timed(CHECKPOINT, getattr(saver, name))))


def count_acting_as_forward(model: nn.Module, call: Call, timeline: Timeline) -> None:
    """Let a profiled model's `call` in training mode, but without gradients, count as forward, and not as evaluation.

    So agents act, and generators make what a critic learns from.
    """
    profiled: Call = model._compiled_call_impl  # type: ignore[assignment]
    acting = timeline.timed(FORWARD, call)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not model.training:
            return profiled(*args, **kwargs)
        return acting(*args, **kwargs)

    model._compiled_call_impl = forward  # type: ignore[assignment]  # until the profile takes its own back
