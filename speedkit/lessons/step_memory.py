"""What lessons measure of memory: where the bytes of a step are, and whether a request fits between holes."""

from collections.abc import Callable
from typing import Any

import torch

from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import memory
from speedkit.train.batches import micro_batches, next_batch
from speedkit.train.loop import train
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

MIB = 1 << 20


def memory_of(workload: Workload, recipe: Recipe, plan: Plan) -> dict[str, int]:
    """Return the bytes of weights with their gradients, optimizer and activations of a step, and its peak beside them.

    `kept_bytes` are the activations of a micro-batch, which wait for its backward pass.
    """
    training = setup_run(workload, recipe, plan, endless=True, progress=False)
    training.position.batch = batch = next_batch(training)
    steps = train(training)
    next(steps)  # the optimizer's state is made here
    weights = sum(weight.nbytes for weight in training.learner.model.parameters())
    states = training.learner.optimizer.state.values()
    optimizer = sum(each.nbytes for state in states for each in state.values() if torch.is_tensor(each))

    def loss() -> Any:
        with training.learner.precision.context:
            return workload.loss(training.learner.model.train(), part, recipe)[0]

    part, _ = micro_batches(training, batch)[0]
    kept = activation_bytes(loss, training.device)
    peak = memory.peak_bytes(lambda: next(steps), training.device)
    training.close()
    return {"weights_bytes": 2 * weights, "optimizer_bytes": optimizer, "kept_bytes": kept, "peak_bytes": peak}


def activation_bytes(forward: Callable[[], Any], device: torch.device) -> int:
    """Return the bytes that `forward`, which returns its loss, keeps for the backward pass.

    What a first call sets up (compiled code, tables) counts: call it once before.
    """
    return memory.allocated_bytes(forward, device)[-1]


def fits_between_holes(first: Callable[[], Any], device: torch.device) -> bool:
    """Return whether a GPU that is full of holes grants a quarter of what is free, after calling `first()`."""
    held = [torch.empty(8 * MIB, dtype=torch.uint8, device=device) for _ in range(256)]
    del held[::2]
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 16 * MIB) / total, device)
    first()
    try:
        torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return True
