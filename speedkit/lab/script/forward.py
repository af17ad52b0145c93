"""A model's call in a script, and what is switched on around it."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from speedkit.measure.timeline import AFTER_FORWARD, FORWARD, Timeline


class Forward:
    """A model's call, with what is switched on around it; an evaluation stays as it is."""

    inside = False  # of another one's call

    def __init__(self, model: nn.Module, timeline: Timeline) -> None:
        self.model = model
        self.timeline = timeline
        self.plain: Callable[..., Any] = model._compiled_call_impl  # type: ignore[assignment]  # timed
        self.compiled: Callable[..., Any] | None = None
        self.graphs = False  # of CUDA, whose outputs the next call overwrites
        self.contexts: dict[str, Callable[[], Any]] = {}
        self.calls = 0
        self.autocast = False  # by the script itself
        self.failure: Exception | None = None
        model._compiled_call_impl = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, 16-bit numbers of ours as float32; what fails under a switch runs without."""
        if Forward.inside or not (self.model.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        self.calls += 1
        self.autocast |= torch.is_autocast_enabled(next(self.model.parameters()).device.type)
        Forward.inside = True
        try:
            return self._switched(*args, **kwargs)
        except Exception as error:
            if not self.contexts and self.compiled is None:
                raise
            self.failure = error
            return self.plain(*args, **kwargs)
        finally:
            Forward.inside = False

    def _switched(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context in self.contexts.values():
                stack.enter_context(context())
            if self.compiled is None:
                outputs = self.plain(*args, **kwargs)
            else:
                self.timeline.begin(FORWARD, then=AFTER_FORWARD)
                stack.callback(self.timeline.end)
                if self.graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                outputs = self.compiled(*args, **kwargs)
        if self.graphs:
            outputs = tree_map_only(Tensor, Tensor.clone, outputs)
        if "precision" in self.contexts:
            outputs = tree_map_only(Tensor, as_float, outputs)
        return outputs


def as_float(tensor: Tensor) -> Tensor:
    """Return a tensor, of 16-bit numbers as float32."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def why_not_around(forwards: Sequence[Forward]) -> str:
    """Return why nothing can be put around the forward pass, or ""."""
    if any(forward.calls for forward in forwards):
        return ""
    return "the script never calls its model as model(inputs), and only such a call can be wrapped"
