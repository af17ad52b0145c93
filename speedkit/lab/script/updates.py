"""Switches of a script's weights, gradients and updates, and of its process."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from speedkit.lab.script.feed import Candidate, asynchronous_copies
from speedkit.lab.script.models import weights_of
from speedkit.machine import Hardware
from speedkit.measure.optimizations import Change
from speedkit.measure.optimizations import threads as threads_for
from speedkit.plan import Plan
from speedkit.train.optimizer import fuse

FUSED = (Adam, AdamW, SGD)  # optimizers with a fused kernel on every device


# ---- weights, gradients and updates ----


class MemoryFormat:
    """Weights of images' layers as NHWC, with the optimizer's state."""

    fields = ("channels_last",)

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.models = models
        self.optimizers = optimizers

    def candidates(self) -> Iterator[Candidate]:
        """Yield it for models with weights in four dimensions."""
        weights = [weight for model in self.models for weight in model.parameters() if weight.dim() == 4]
        why = ""
        if not weights:
            why = "the model has no two-dimensional convolution"
        elif all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
            why = "its weights are channels_last already"
        yield "channels_last", {"channels_last": True}, why

    def set(self, wanted: Change) -> None:
        """Bring weights and state into the format, or back."""
        layout = torch.channels_last if wanted else torch.contiguous_format
        for model in self.models:
            model.to(memory_format=layout)  # type: ignore[call-overload]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() == 4:
                        state[name] = value.to(memory_format=layout)


class Update:
    """The optimizer's fused kernel."""

    fields = ("fused_optimizer",)

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.own: list[tuple[dict[str, Any], dict[str, Any]]] = []  # options, and what they were

    def candidates(self) -> Iterator[Candidate]:
        """Yield it for optimizers that have one."""
        yield "host_syncs", {"fused_optimizer": True}, self._why_not()

    def _why_not(self) -> str:
        for optimizer in self.optimizers:
            if type(optimizer) not in FUSED:
                return f"a {type(optimizer).__name__} has no fused kernel"
            if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
                return "its optimizer is differentiable or capturable"
            if any(not weight.is_floating_point() for weight in weights_of(optimizer)):
                return "some of its weights are no floating-point numbers"
        if all(group.get("fused") for optimizer in self.optimizers for group in optimizer.param_groups):
            return "its optimizer is fused already"
        return ""

    def set(self, wanted: Change) -> None:
        """Update by the fused kernel, or by that of the script."""
        for optimizer in self.optimizers:
            if wanted:
                options = (optimizer.defaults, *optimizer.param_groups)
                self.own += [(group, {name: group[name] for name in ("fused", "foreach")}) for group in options]
                fuse(optimizer)
            else:
                optimizer.__dict__.pop("_step_supports_amp_scaling", None)
            for weight, state in optimizer.state.items():
                if isinstance(state.get("step"), Tensor):  # where the kernel reads it
                    state["step"] = state["step"].to(weight.device if wanted else "cpu")
        if not wanted:
            for group, own in self.own:
                group.update(own)
            self.own.clear()


class Gradients:
    """Gradients dropped after an update, where the script sets them to zero."""

    fields = ("set_to_none",)

    def __init__(self) -> None:
        self.asked = False  # for zeros, by the script
        self.dropped = False

    def seen(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        """Return `zero_grad`, a method of optimizers or modules, with this switch in it."""

        def call(owner: Any, set_to_none: bool = True) -> None:
            self.asked |= not set_to_none
            zero_grad(owner, set_to_none=set_to_none or self.dropped)

        return call

    def candidates(self) -> Iterator[Candidate]:
        """Yield it for scripts that ask for zeros."""
        if self.asked:
            yield "zero_grad", {"set_to_none": True}, ""

    def set(self, wanted: Change) -> None:
        """Drop gradients, or do as the script asks."""
        self.dropped = bool(wanted)


# ---- the process ----


class Threads:
    """PyTorch's threads within an operation, on a CPU."""

    fields = ("threads",)

    def __init__(self, hardware: Hardware) -> None:
        self.own = torch.get_num_threads()
        self.hardware = dataclasses.replace(hardware, threads=self.own)

    def candidates(self) -> Iterator[Candidate]:
        """Yield fewer than the script has."""
        for change in threads_for(Plan(), self.hardware):
            yield "threads", change, ""

    def set(self, wanted: Change) -> None:
        """Compute with so many threads."""
        torch.set_num_threads(wanted.get("threads", self.own))


class Copies:
    """Copies of pinned batches that the host does not wait for."""

    fields = ("pin_memory",)

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()

    def candidates(self) -> Iterator[Candidate]:
        """Yield nothing: the feed's batches are pinned, and this goes with them."""
        return iter(())

    def set(self, wanted: Change) -> None:
        """Copy beside the host, or as the script does."""
        self.stack.close()
        if wanted:
            self.stack.enter_context(asynchronous_copies())
