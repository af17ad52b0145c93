"""What can be switched on and off between two steps of a script's loop, each by the fields of a plan that it is about.

Of every switch `candidates` says what can be tried and why not, and `set` does what its fields say, and without
them as the script does.
"""

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map_only

from speedkit.machine import Hardware
from speedkit.measure.optimizations import Change
from speedkit.measure.optimizations import threads as threads_for
from speedkit.measure.profile import LoopProfile
from speedkit.measure.script import weights_of
from speedkit.measure.script_feed import Feed, asynchronous_copies
from speedkit.measure.timeline import AFTER_FORWARD, FORWARD, Timeline
from speedkit.plan import Plan
from speedkit.train.attention import BACKENDS
from speedkit.train.compile import BACKEND, RECOMPILE_LIMIT
from speedkit.train.optimizer import fuse
from speedkit.train.process_state import keep_switches

FUSED = (Adam, AdamW, SGD)  # optimizers with a fused kernel on every device
Candidate = tuple[str, Change, str]  # the optimization, the fields of the plan, why it cannot be tried or ""


class Switch(Protocol):
    """Something that is switched on and off between two steps."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields of a plan that it is about."""

    def candidates(self) -> Iterator[Candidate]:
        """Yield what can be tried, or why not."""

    def set(self, wanted: Change) -> None:
        """Do what these fields say, and what is in none of them as the script does."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """What was found of a script's loop."""

    profile: LoopProfile
    optimizers: list[Optimizer]
    feed: Feed
    hardware: Hardware
    operators: dict[str, int]  # FLOPs of a step by operator
    zeros: bool  # gradients are set to zero instead of being dropped
    compiled: bool  # by the script itself
    forwards: list["Forward"]

    def switches(self) -> list[Switch]:
        """Return all switches, none of them on."""
        kinds = (Precision, MemoryFormat, Update, Compilation, Attention, Gradients, Threads, Copies)
        return [self.feed, *(kind(self) for kind in kinds)]


# ---- around the forward pass ----


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


class Precision:
    """The number format of products: TF32, and bf16 by autocast around the forward pass."""

    fields = ("precision",)

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.tf32 = contextlib.ExitStack()

    def candidates(self) -> Iterator[Candidate]:
        """Yield TF32 where the device has it, and bf16."""
        if self.loop.hardware.device.type == "cuda":
            why = self.loop.hardware.why_not("tf32")
            if torch.backends.cuda.matmul.fp32_precision == "tf32":
                why = "the script has it switched on"
            yield "precision", {"precision": "tf32"}, why
        yield "precision", {"precision": "bf16"}, self._why_not_bf16()

    def _why_not_bf16(self) -> str:
        if why := self.loop.hardware.why_not("bf16"):
            return why
        if any(forward.autocast for forward in self.loop.forwards):
            return "the script has autocast switched on"
        formats = self.loop.profile.observer.facts.trace.products_s
        if formats and max(formats, key=formats.__getitem__) in ("bf16", "fp16"):
            return "most of its products are in 16 bits already"
        return why_not_around(self.loop.forwards)

    def set(self, wanted: Change) -> None:
        """Switch a number format on, or none."""
        self.tf32.close()
        for forward in self.loop.forwards:
            forward.contexts.pop("precision", None)
        if wanted.get("precision") == "tf32":
            keep_switches(self.tf32)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        if wanted.get("precision") == "bf16":
            kind = self.loop.hardware.device.type
            for forward in self.loop.forwards:
                forward.contexts["precision"] = functools.partial(torch.autocast, kind, torch.bfloat16)


def why_not_around(forwards: Sequence[Forward]) -> str:
    """Return why nothing can be put around the forward pass, or ""."""
    if any(forward.calls for forward in forwards):
        return ""
    return "the script does not call its model as a function, model(inputs), so nothing can be put around that"


class Attention:
    """The kernel of attention, on a GPU."""

    fields = ("attention",)

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def candidates(self) -> Iterator[Candidate]:
        """Yield two kernels, where the model computes attention."""
        if self.loop.hardware.device.type == "cuda":
            why = why_not_around(self.loop.forwards)
            if not any("attention" in name for name in self.loop.operators):
                why = "no attention was computed in the step that was looked at"
            for kernel in ("cudnn", "flash"):
                yield "attention", {"attention": kernel}, why

    def set(self, wanted: Change) -> None:
        """Prefer a kernel, or none."""
        order = [BACKENDS[name] for name in dict.fromkeys((*wanted.values(), *BACKENDS))]
        for forward in self.loop.forwards:
            forward.contexts.pop("attention", None)
            if wanted:
                forward.contexts["attention"] = functools.partial(sdpa_kernel, order, set_priority=True)


class Compilation:
    """torch.compile of what the loop calls, beside its plain form."""

    fields = ("compile",)

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.made: dict[tuple[Forward, str], Callable[..., Any]] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Yield the modes of torch.compile that the device has."""
        hardware = self.loop.hardware
        why = hardware.why_not("compile") or why_not_around(self.loop.forwards)
        if self.loop.compiled:
            why = "the script compiles its model already"
        yield "compile", {"compile": "default"}, why
        if hardware.supports("cuda_graphs"):
            yield "compile", {"compile": "reduce-overhead"}, why

    def set(self, wanted: Change) -> None:
        """Call compiled code, or none."""
        mode = wanted.get("compile")
        for forward in self.loop.forwards:
            forward.compiled = None
            forward.graphs = mode == "reduce-overhead"
            if mode and forward.calls:
                key = (forward, mode)
                if key not in self.made:
                    self.made[key] = self._compile(forward.model, mode)
                forward.compiled = self.made[key]

    @staticmethod
    def _compile(model: nn.Module, mode: str) -> Callable[..., Any]:
        torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
        # As the outermost call dynamo skips PyTorch's own code: nothing of a plain Sequential would be compiled.
        with torch._dynamo.config.patch(wrap_top_frame=type(model).__module__.startswith("torch.")):
            return torch.compile(model._call_impl, backend=BACKEND, mode=mode)


# ---- weights, gradients and updates ----


class MemoryFormat:
    """Weights of images' layers as NHWC, with the optimizer's state."""

    fields = ("channels_last",)

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def candidates(self) -> Iterator[Candidate]:
        """Yield it for models with weights in four dimensions."""
        weights = [weight for model in self.loop.profile.models for weight in model.parameters() if weight.dim() == 4]
        why = ""
        if not weights:
            why = "the model has no two-dimensional convolution"
        elif all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
            why = "its weights are so already"
        yield "channels_last", {"channels_last": True}, why

    def set(self, wanted: Change) -> None:
        """Bring weights and state into the format, or back."""
        layout = torch.channels_last if wanted else torch.contiguous_format
        for model in self.loop.profile.models:
            model.to(memory_format=layout)  # type: ignore[call-overload]
        for optimizer in self.loop.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() == 4:
                        state[name] = value.to(memory_format=layout)


class Update:
    """The optimizer's fused kernel."""

    fields = ("fused_optimizer",)

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.own: list[tuple[dict[str, Any], dict[str, Any]]] = []  # options, and what they were

    def candidates(self) -> Iterator[Candidate]:
        """Yield it for optimizers that have one."""
        yield "host_syncs", {"fused_optimizer": True}, self._why_not()

    def _why_not(self) -> str:
        for optimizer in self.loop.optimizers:
            if type(optimizer) not in FUSED:
                return f"a {type(optimizer).__name__} has no fused kernel"
            if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
                return "its optimizer is differentiable or capturable"
            if any(not weight.is_floating_point() for weight in weights_of(optimizer)):
                return "some of its weights are no floating-point numbers"
        if all(group.get("fused") for optimizer in self.loop.optimizers for group in optimizer.param_groups):
            return "its optimizer is fused already"
        return ""

    def set(self, wanted: Change) -> None:
        """Update by the fused kernel, or by that of the script."""
        for optimizer in self.loop.optimizers:
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
    forced = False

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def candidates(self) -> Iterator[Candidate]:
        """Yield it for scripts that ask for zeros."""
        if self.loop.zeros:
            yield "zero_grad", {"set_to_none": True}, ""

    def set(self, wanted: Change) -> None:
        """Drop gradients, or do as the script asks."""
        Gradients.forced = bool(wanted)


# ---- the process ----


class Threads:
    """PyTorch's threads within an operation, on a CPU."""

    fields = ("threads",)

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.own = torch.get_num_threads()

    def candidates(self) -> Iterator[Candidate]:
        """Yield fewer than the script has."""
        hardware = dataclasses.replace(self.loop.hardware, threads=self.own)
        for change in threads_for(Plan(), hardware):
            yield "threads", change, ""

    def set(self, wanted: Change) -> None:
        """Compute with so many threads."""
        torch.set_num_threads(wanted.get("threads", self.own))


class Copies:
    """Copies of pinned batches that the host does not wait for."""

    fields = ("pin_memory",)

    def __init__(self, loop: Loop) -> None:
        self.stack = contextlib.ExitStack()

    def candidates(self) -> Iterator[Candidate]:
        """Yield nothing: the feed's batches are pinned, and this goes with them."""
        return iter(())

    def set(self, wanted: Change) -> None:
        """Copy beside the host, or as the script does."""
        self.stack.close()
        if wanted:
            self.stack.enter_context(asynchronous_copies())


@dataclasses.dataclass
class Plugged:
    """The switches of a loop, and the plan that they do now."""

    switches: list[Switch]
    now: dict[int, Change] = dataclasses.field(default_factory=lambda: defaultdict(dict))

    def apply(self, plan: Change) -> bool:
        """Switch to `plan`; return whether anything has changed."""
        changed = False
        for number, switch in enumerate(self.switches):
            wanted = {field: plan[field] for field in switch.fields if field in plan}
            if wanted != self.now[number]:
                switch.set(wanted)
                self.now[number] = wanted
                changed = True
        return changed
