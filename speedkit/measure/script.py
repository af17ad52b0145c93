"""Profile a script that nobody edits: run it as Python would, see what it trains, and profile that loop to its end."""

import contextlib
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer, optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from speedkit.clock import compilations
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import claim_folder, write_json
from speedkit.machine import this_machine
from speedkit.measure.optimizations import levers
from speedkit.measure.profile import LoopProfile
from speedkit.plan import Plan

SEEN_STEPS = 2  # of all optimizers, before the largest of these is profiled


class ScriptProfile:
    """What is seen of a script: `loop` is the profile of its training loop, None where it made too few steps."""

    def __init__(self, skip: int = 3, steps: int = 20):
        self.skip, self.steps = skip, steps
        self.loop: LoopProfile | None = None
        self.framework = "PyTorch"
        self.optimizers: list[Optimizer] = []  # one for each step so far
        self.loaders: dict[int, DataLoader] = {}  # by their iterator
        self.loader: DataLoader | None = None  # that gave the latest batch
        self.modules = weakref.WeakValueDictionary[int, nn.Module]()  # all that the script has made, by their id
        self.stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See optimizer steps and batches inside the block; what is seen changes nothing that is learned."""
        iterate, fetch = DataLoader.__iter__, _BaseDataLoaderIter.__next__
        make, copy = nn.Module.__init__, nn.Module.__setstate__

        def iterator(loader: DataLoader) -> Any:
            batches = iterate(loader)
            self.loaders[id(batches)] = loader
            return batches

        def next_batch(batches: Any) -> Any:
            loader, loop = self.loaders.get(id(batches)), self.loop
            if loop is None:
                self.loader = loader
                return fetch(batches)
            return loop.next_batch(fetch, batches) if loader is loop.loader else fetch(batches)

        # A forward hook for all modules would be compiled into the script's code, and again once it is removed.
        def made(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.modules[id(module)] = module
            make(module, *args, **kwargs)

        def copied(module: nn.Module, state: Any) -> None:
            self.modules[id(module)] = module
            copy(module, state)

        with self.stack:
            self.stack.enter_context(patch.object(nn.Module, "__init__", made))
            self.stack.enter_context(patch.object(nn.Module, "__setstate__", copied))
            self.stack.enter_context(patch.object(DataLoader, "__iter__", iterator))
            self.stack.enter_context(patch.object(_BaseDataLoaderIter, "__next__", next_batch))
            self.stack.callback(optimizer.register_optimizer_step_post_hook(self._after_step).remove)
            yield

    def _after_step(self, stepped: Optimizer, *_: Any) -> None:
        if self.loop is not None or len(self.optimizers) == SEEN_STEPS:
            return
        self.optimizers.append(stepped)
        if len(self.optimizers) == SEEN_STEPS:
            self._profile(max(self.optimizers, key=lambda each: sum(map(torch.numel, weights_of(each)))))

    def _profile(self, largest: Optimizer) -> None:
        """Profile the loop of the optimizer that updates most weights."""
        models = models_of(largest, list(self.modules.values()))
        self.framework = framework_of(models)
        compiled = compilations() > 0  # the script has compiled whatever is compiled in this process
        loop = LoopProfile(models, largest, self.loader, skip=self.skip, steps=self.steps, compiled=compiled)
        loop.install(self.stack)
        self.loop = loop


def framework_of(models: Sequence[nn.Module]) -> str:
    """Return the framework that trains `models`: the first that the script has imported and uses, else PyTorch."""
    if {"lightning", "pytorch_lightning"} & sys.modules.keys() and any(map(has_own_steps, models)):
        return "Lightning"
    if "transformers.trainer" in sys.modules:  # which the package imports only for who uses it
        return "Hugging Face"
    if "accelerate" in sys.modules and sys.modules["accelerate"].state.is_initialized():
        return "Accelerate"
    return "PyTorch"


def has_own_steps(module: nn.Module) -> bool:
    """Return whether `module` is one of Lightning's, whose steps are methods."""
    return hasattr(module, "training_step")


def weights_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all tensors that an optimizer updates."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def models_of(optimizer: Optimizer, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of all `modules` that a loop calls: the outermost with weights of the optimizer.

    A LightningModule's own steps are methods: its children are called too.
    """
    weights = {id(weight) for weight in weights_of(optimizer)}
    owners = [module for module in modules if any(id(weight) in weights for weight in module.parameters())]
    inner = {id(child) for module in owners for child in module.modules() if child is not module}
    outermost = [module for module in owners if id(module) not in inner]
    children = [child for module in filter(has_own_steps, outermost) for child in module.children()]
    return outermost + [child for child in children if child in owners]


def profile_script(
    path: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    in_words: Callable[[str, str], str] = lambda change, framework: "",
) -> None:
    """Run the script at `path` with its own `arguments`, show why its steps take long, and leave `out`/breakdown.json.

    Nothing in it is edited. It finds what `with profile(...)` is given: the optimizer that updates most weights, the
    modules that own these, and the DataLoader whose batches they learn from, if it is one. `in_words`
    tells how a framework spells a change, "" where it has no word. A script that fails does so as ever, after the
    breakdown of what ran. Raises UsageError where there is no such script, SpeedkitError where it made no step.
    """
    if not path.is_file():
        raise UsageError(f"there is no script {path}: name a file, with its own arguments after it")
    seen, folder = ScriptProfile(), claim_folder(out, "profile")
    try:
        with (
            patch.object(sys, "argv", [str(path), *arguments]),
            patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
            seen.installed(),
        ):
            runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        frames = traceback.TracebackException.from_exception(error)
        names = [frame.filename for frame in frames.stack]
        frames.stack = traceback.StackSummary.from_list(
            frames.stack[names.index(str(path)) :] if str(path) in names else []
        )
        print("".join(frames.format()), end="", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        if seen.loop is not None:
            report(seen, path, folder, in_words=in_words)
    if seen.loop is None:
        raise SpeedkitError(f"{path} made {len(seen.optimizers)} optimizer steps, too few to see where their time goes")


def report(seen: ScriptProfile, path: Path, folder: Path, *, in_words: Callable[[str, str], str]) -> None:
    """Show what was seen of a script, with the changes in the words of its framework, and leave breakdown.json."""
    loop = seen.loop
    assert loop is not None
    loop.conclude(show=True)
    for row in loop.bottlenecks:
        row["in_words"] = in_words(row["change"], seen.framework)
        print(f"{row['cause']}, in {seen.framework}: {row['in_words'] or row['change']}")
    if loop.observer.timed and not loop.bottlenecks:
        formats = loop.observer.facts.trace.products_s
        switched_on = Plan(
            precision="bf16" if max(formats, key=lambda name: formats[name], default="") == "bf16" else "default",
            compile="default" if compilations() else "off",
            fused_optimizer=all(group.get("fused") for group in loop.optimizer.param_groups),
        )
        print(next_levers(switched_on, loop.breakdown.rows, str(loop.device)))
    facts = {"script": path.name, "framework": seen.framework, "bottlenecks": loop.bottlenecks, "notes": loop.notes}
    write_json(folder / "breakdown.json", loop.breakdown.as_dict() | facts)
    print(f"breakdown.json in {folder}", flush=True)


def next_levers(plan: Plan, rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Return in a sentence what to try under `plan` where no cause stands out, by the `rows` of its breakdown."""
    machine, shares = this_machine(device), {row["cause"]: row["share"] for row in rows}
    return f"nothing stands out: the device computes. Next to try: {'; '.join(levers(plan, shares, machine))}"
