"""What the time of a script's loop counts as, where a profile of the loop alone would take it for something else."""

import contextlib
import sys
from typing import Any
from unittest.mock import patch

from torch.optim import Optimizer

from speedkit.measure.profile import LoopProfile
from speedkit.measure.timeline import AFTER_FORWARD, CHECKPOINT, OPTIMIZER

CHECKPOINTS = {  # what makes one, beside torch.save: module, and name in it
    "lightning.pytorch": "Trainer.save_checkpoint",
    "pytorch_lightning": "Trainer.save_checkpoint",
    "transformers.trainer": "Trainer._save_checkpoint",
    "accelerate": "Accelerator.save_state",
}


def install(loop: LoopProfile, optimizers: set[Optimizer], stack: contextlib.ExitStack) -> None:
    """See everything that a script's loop does, with all its `optimizers`, until `stack` is closed."""
    loop.install(stack)
    for model in loop.models:
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
