"""Profile a script that nobody edits: run it as Python would, see what it trains, and profile that loop to its end."""

import contextlib
import dataclasses
import gc
import math
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer, optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from speedkit.data.batches import STOPS
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import claim_folder, write_json
from speedkit.machine import this_machine
from speedkit.measure.optimizations import Change, plan_of, text
from speedkit.measure.peaks import matmul_rates
from speedkit.measure.predict import predict
from speedkit.measure.profile import LoopProfile
from speedkit.measure.timeline import BACKWARD, FORWARD, OPTIMIZER
from speedkit.measure.trace import BANDWIDTH, COMPUTE
from speedkit.measure.warm_up import compilations
from speedkit.plan import Plan

COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, COMPUTE, BANDWIDTH)
SEEN_STEPS = 2  # of all optimizers, before the largest of these is profiled


class ScriptProfile:
    """What is seen of a script: `loop` is the profile of its training loop, None where it made too few steps."""

    def __init__(self) -> None:
        self.loop: LoopProfile | None = None
        self.framework = "PyTorch"
        self.optimizers: list[Optimizer] = []  # one for each step so far
        self.loaders: dict[int, DataLoader] = {}  # by their iterator
        self.loader: DataLoader | None = None  # that gave the latest batch
        self.stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See optimizer steps and batches inside the block; what is seen changes nothing that is learned."""
        iterate = DataLoader.__iter__
        fetch = _BaseDataLoaderIter.__next__

        def iterator(loader: DataLoader) -> Any:
            batches = iterate(loader)
            self.loaders[id(batches)] = loader
            return batches

        def next_batch(batches: Any) -> Any:
            loader = self.loaders.get(id(batches))
            if self.loop is None:
                self.loader = loader
            elif loader is self.loop.loader:
                return self.loop.next_batch(fetch, batches)
            return fetch(batches)

        with (
            self.stack,
            patch.object(DataLoader, "__iter__", iterator),
            patch.object(_BaseDataLoaderIter, "__next__", next_batch),
        ):
            self.stack.callback(optimizer.register_optimizer_step_post_hook(self._after_step).remove)
            yield

    def _after_step(self, stepped: Optimizer, *_: Any) -> None:
        if self.loop is not None or len(self.optimizers) == SEEN_STEPS:
            return
        self.optimizers.append(stepped)
        if len(self.optimizers) == SEEN_STEPS:
            largest = max(self.optimizers, key=weight_count)
            # A forward hook for all modules would be compiled into the script's code, and again once it is removed.
            modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
            models = models_of(self.optimizers, modules)
            self.framework = framework_of(models)
            compiled = compilations() > 0  # the script has compiled whatever is compiled in this process
            self.loop = LoopProfile(models, largest, self.loader, compiled=compiled)
            self.loop.install(self.stack)


def framework_of(models: Sequence[nn.Module]) -> str:
    """Return the framework that trains `models`: the first that the script has imported and uses, else PyTorch."""
    if any(map(has_own_steps, models)):
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


def weight_count(optimizer: Optimizer) -> int:
    """Return how many numbers an optimizer updates."""
    return sum(weight.numel() for weight in weights_of(optimizer))


def models_of(optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of all `modules` that a loop calls: the outermost with weights of the optimizers.

    These may be two, of networks that learn in turns. A LightningModule's own steps are methods: its children are
    called too.
    """
    weights = {id(weight) for optimizer in optimizers for weight in weights_of(optimizer)}
    owners = [module for module in modules if any(id(weight) in weights for weight in module.parameters())]
    inner = {child for module in owners for child in module.modules() if child is not module}
    models = [module for module in owners if module not in inner]
    for module in filter(has_own_steps, list(models)):
        models += [child for child in module.children() if child in owners]
    return models


def profile_script(
    path: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    in_words: Callable[[str, str], str],
) -> None:
    """Run the script at `path` with its own `arguments`, show why its steps take long, and leave `out`/breakdown.json.

    Nothing in it is edited. It finds what `with profile(...)` is given: the optimizer that updates most weights, the
    modules that own these, and the DataLoader whose batches they learn from, if it is one. `in_words`
    tells how a framework spells a change, "" where it has no word. A script that fails does so as ever, after the
    breakdown of what ran. Raises UsageError where there is no such script, SpeedkitError where it made no step.
    """
    if not path.is_file():
        raise UsageError(f"there is no script {path}: name a file, with its own arguments after it")
    seen = ScriptProfile()
    folder = claim_folder(out, "profile")
    try:
        with (
            patch.object(sys, "argv", [str(path), *arguments]),
            patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
            pythons_signals(),
            seen.installed(),
        ):
            runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_frame.f_code.co_filename != str(path):
            frame = frame.tb_next  # what runs the script is none of its business
        traceback.print_exception(type(error), error, frame)
        raise SystemExit(1) from error
    finally:
        if seen.loop is not None:
            report(seen, path, folder, in_words=in_words)
    if seen.loop is None:
        raise SpeedkitError(f"{path} made {len(seen.optimizers)} optimizer steps, too few to see where their time goes")


@contextlib.contextmanager
def pythons_signals() -> Iterator[None]:
    """Handle signals inside as Python does by itself: the script's processes inherit it, and end when they are told."""
    with contextlib.ExitStack() as stack:
        for number in STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                stack.callback(signal.signal, number, signal.signal(number, own))
        yield


def report(seen: ScriptProfile, path: Path, folder: Path, *, in_words: Callable[[str, str], str]) -> None:
    """Show what was seen of a script, with the changes in the words of its framework, and leave breakdown.json."""
    loop = seen.loop
    assert loop is not None
    loop.conclude(show=True)
    for row in loop.bottlenecks:
        row["in_words"] = in_words(row["change"], seen.framework)
        print(f"{row['cause']}, in {seen.framework}: {row['in_words'] or row['change']}")
    if loop.nothing_stands_out:
        switched_on: Change = {"fused_optimizer": all(group.get("fused") for group in loop.optimizer.param_groups)}
        formats = loop.observer.facts.trace.products_s
        if formats and max(formats, key=formats.__getitem__) == "bf16":
            switched_on["precision"] = "bf16"
        if compilations():
            switched_on["compile"] = "default"
        print(next_levers(plan_of([switched_on]), loop.breakdown.rows, str(loop.device)))
    facts = {"script": path.name, "framework": seen.framework, "bottlenecks": loop.bottlenecks, "notes": loop.notes}
    write_json(folder / "breakdown.json", loop.breakdown.as_dict() | facts)
    print(f"breakdown.json in {folder}", flush=True)


def next_levers(plan: Plan, rows: Sequence[Mapping[str, Any]], device: str) -> str:
    """Return in a sentence what to try under `plan` where no cause stands out, by the `rows` of its breakdown."""
    hardware = this_machine(device)
    changes: list[Change] = [{"fused_optimizer": True}]
    if hardware.supports("bf16"):
        changes.append({"precision": "bf16"})
    if hardware.supports("compile"):
        changes.append({"compile": "default"})
    rates = matmul_rates(hardware)
    products = {"bf16": (1.0, max(1.0, rates.get("bf16", 1.0) / rates["fp32"]))}  # where all are products
    shares = {row["cause"]: row["share"] for row in rows}
    gains = {}
    for change in changes:
        if dataclasses.replace(plan, **change) != plan:
            gains[text(change)] = predict(change, shares, gains=products)
    at_work = sum(row["share"] for row in rows if row["cause"] in COMPUTING)
    best_first = sorted(gains, key=lambda change: -math.prod(gains[change]))
    tries = ["{}, {:.2f} to {:.2f} times as fast".format(change, *gains[change]) for change in best_first]
    return f"nothing stands out, and operators are {at_work:.0%} of a step. Next to try: {'; '.join(tries)}"
