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
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.optim import Optimizer

from speedkit.lab.script.feed import Candidate, Feed
from speedkit.lab.script.forward import Forward, why_not_around
from speedkit.lab.script.updates import Copies, Gradients, MemoryFormat, Threads, Update
from speedkit.machine import Hardware
from speedkit.measure.optimizations import Change
from speedkit.measure.profile import LoopProfile
from speedkit.train.attention import BACKENDS
from speedkit.train.compile import BACKEND, RECOMPILE_LIMIT
from speedkit.train.process_state import keep_switches


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
    gradients: Gradients
    compiled: bool  # by the script itself
    forwards: list[Forward]

    def switches(self) -> list[Switch]:
        """Return all switches, none of them on."""
        memory_format = MemoryFormat(self.profile.models, self.optimizers)
        around: list[Switch] = [Precision(self), Attention(self), Compilation(self)]
        rest: list[Switch] = [Update(self.optimizers), self.gradients, Threads(self.hardware), Copies()]
        return [self.feed, memory_format, *around, *rest]


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
                why = "no kernel of attention ran in the step that was looked at"
            for kernel in ("cudnn", "flash"):
                yield "attention", {"attention": kernel}, why

    def set(self, wanted: Change) -> None:
        """Compute by a kernel, and what it refuses by math, as a patch does; or as the script does."""
        allowed = [BACKENDS[name] for name in (*wanted.values(), "math")]
        for forward in self.loop.forwards:
            forward.contexts.pop("attention", None)
            if wanted:
                forward.contexts["attention"] = functools.partial(sdpa_kernel, allowed)


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
                self.now[number] = wanted
                switch.set(wanted)  # after it: what fails half-way is undone by the next plan
                changed = True
        return changed

    def close(self) -> None:
        """Switch all off, one by one: none is left on because another fails, of weights that are on their way out."""
        for number, switch in enumerate(self.switches):
            if self.now[number]:
                with contextlib.suppress(Exception):
                    switch.set({})
