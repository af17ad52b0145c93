"""Profile a script that nobody edits: run it as Python would, see what it trains, and profile that loop to its end."""

import contextlib
import dataclasses
import functools
import gc
import math
import os
import runpy
import sys
import weakref
from builtins import print  # to which a script may give another meaning
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer, optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from speedkit.busy import LITTLE, others, told
from speedkit.files import claim_folder, read_json, write_json
from speedkit.lab.frameworks import change_in_words
from speedkit.lab.script.accounting import install
from speedkit.lab.script.models import models_of, weight_count
from speedkit.lab.script.run import as_python, check_script
from speedkit.machine import this_machine
from speedkit.measure.bottlenecks import Row
from speedkit.measure.hang import hang_told
from speedkit.measure.optimizations import Change, plan_of, text
from speedkit.measure.peaks import matmul_rates
from speedkit.measure.predict import predict
from speedkit.measure.profile import LoopProfile
from speedkit.measure.profile_report import difference
from speedkit.measure.timeline import BACKWARD, FORWARD, OPTIMIZER
from speedkit.measure.trace import BANDWIDTH, COMPUTE
from speedkit.measure.warm_up import compilations
from speedkit.plan import Plan

COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, COMPUTE, BANDWIDTH)
ANSWER_S = 30.0  # of stepping, after which there is a first answer
MOST_STEPS = 24  # of all optimizers, before a loop is profiled where one that was made steps in none


class ScriptProfile:
    """What is seen of a script: `loop` is the profile of its training loop, None where it made too few steps."""

    def __init__(self, folder: Path, hang_s: float, *, stop: bool) -> None:
        self.folder = folder
        self.hang_s = hang_s
        self.stop = stop  # with the first answer
        self.answered = False
        self.began_s = 0.0  # the loop
        self.backwards = 0  # before there is a loop
        self.others = 0  # steps of optimizers that came later than a round of the loop
        self.loop: LoopProfile | None = None
        self.framework = "PyTorch"
        self.made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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
            elif takes_from(self.loop, loader):
                return self.loop.next_batch(fetch, batches)
            return fetch(batches)

        make = Optimizer.__init__

        @functools.wraps(make)
        def made(one: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(one, *args, **kwargs)
            self.made.add(one)

        backward = torch.autograd.backward

        def counted(*args: Any, **kwargs: Any) -> None:
            self.backwards += 1
            backward(*args, **kwargs)

        with (
            patch.object(torch.autograd, "backward", counted),
            patch.object(Optimizer, "__init__", made),
            self.stack,
            patch.object(DataLoader, "__iter__", iterator),
            patch.object(_BaseDataLoaderIter, "__next__", next_batch),
        ):
            self.stack.callback(optimizer.register_optimizer_step_post_hook(self._after_step).remove)
            yield

    def _after_step(self, stepped: Optimizer, *_: Any) -> None:
        if self.loop is not None:
            self.others += stepped not in self.optimizers
            if not self.answered and self.loop.observer.timed:
                self._answer(self.loop)
            return
        before = Counter(self.optimizers)
        self.optimizers.append(stepped)
        is_round = stepped is self.optimizers[0] and self.made <= before.keys()
        if before and (is_round or len(self.optimizers) == MOST_STEPS):
            # A step is one of the rarest, and has all steps of the others in it; of several the largest.
            rarest = [one for one, count in before.items() if count == min(before.values())]
            # A forward hook for all modules would be compiled into the script's code, and again once it is removed.
            modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
            models = models_of(self.optimizers, modules)
            self.framework = framework_of(models)
            compiled = compilations() > 0  # the script has compiled whatever is compiled in this process
            self.loop = LoopProfile(models, max(rarest, key=weight_count), self.loader, compiled=compiled)
            install(self.loop, set(self.optimizers), self.stack)
            self.began_s = self.loop.timeline.last_s
            self.stack.enter_context(hang_told(self.loop.timeline, self.hang_s, self.folder / "hang.txt"))

    def _answer(self, loop: LoopProfile) -> None:
        """Show where the time has gone, once the closer look is over or the loop is long under way."""
        if loop.look_end is None and loop.timeline.last_s < self.began_s + ANSWER_S:
            return
        self.answered = True
        if self.stop:
            raise SystemExit(0)
        print(f"speedkit, while the script goes on: {loop.observer.breakdown()}", file=sys.stderr, flush=True)

    def left_out(self) -> list[str]:
        """Return a sentence about the steps that are not in the loop that is profiled, if there are any."""
        if not self.others:
            return []
        return [f"steps of other optimizers that came later are not in here: {self.others}"]

    def too_few(self) -> str:
        """Return why there is no breakdown, "" where there is one."""
        if self.loop is not None and self.loop.observer.timed:
            return ""
        steps = len(self.optimizers) + (self.loop.steps if self.loop else 0)
        if not steps and self.backwards:
            by_itself = "updates its weights by itself, as by p.data -= ...: speedkit takes an optimizer of torch.optim"
            return f"makes {self.backwards} backward passes and {by_itself}"
        where = "where another process trains, name the script of that one"
        return f"made {steps} optimizer steps here, too few to see where their time goes; {where}"


def takes_from(loop: LoopProfile, loader: DataLoader | None) -> bool:
    """Return whether a loop learns from this loader's batches: it is the loop's own, or that one made anew."""
    if not torch.is_grad_enabled():  # it evaluates
        return False
    return loader is loop.loader or (loop.models[0].training and is_alike(loader, loop.loader))


def is_alike(loader: DataLoader | None, other: DataLoader | None) -> bool:
    """Return whether two loaders give as many batches, as large, of data sets of one class in one kind of order."""
    if loader is None or other is None:
        return loader is other
    pairs = ((loader.dataset, other.dataset), (loader.sampler, other.sampler))
    if any(type(one) is not type(another) for one, another in pairs) or loader.batch_size != other.batch_size:
        return False
    with contextlib.suppress(TypeError):  # of a stream, without a length
        return len(loader) == len(other)
    return True


def framework_of(models: Sequence[nn.Module]) -> str:
    """Return the framework that trains `models`: the first that the script has imported and uses, else PyTorch."""
    if any(hasattr(model, "training_step") for model in models):
        return "Lightning"
    if "transformers.trainer" in sys.modules:  # which the package imports only for who uses it
        return "Hugging Face"
    if "accelerate" in sys.modules and sys.modules["accelerate"].state.is_initialized():
        return "Accelerate"
    return "PyTorch"


def profile_script(
    path: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    stop: bool = False,
    hang_s: float = 120.0,
    against: Row | None = None,
) -> None:
    """Run the script at `path` with its own `arguments`, show why its steps take long, and leave `out`/breakdown.json.

    Nothing in it is edited. It finds what `with profile(...)` is given: of the optimizers that step least often the one
    that updates most weights, the modules that own the weights of all, and the DataLoader whose batches they learn
    from, if it is one. `stop` ends the script with the first answer; after `hang_s` without a step it is told where the
    script is; `against` is an older breakdown. Of several ranks each has a folder in `out`. A script that fails or
    exits does so as ever, after the breakdown of what ran. Raises UsageError where there is no such script.
    """
    check_script(path)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        out /= f"rank{os.environ['RANK']}"
    folder = claim_folder(out.absolute(), "profile")
    seen = ScriptProfile(folder, hang_s, stop=stop)

    def conclude() -> None:
        if why := seen.too_few():
            print(f"speedkit: {path} {why}", file=sys.stderr, flush=True)
            return
        report(seen, path, ranks=ranks, against=against)

    with as_python(path, arguments, conclude) as name, seen.installed():
        runpy.run_path(name, run_name="__main__")


def report(seen: ScriptProfile, path: Path, *, ranks: int, against: Row | None) -> None:
    """Show what was seen of a script, with the changes in the words of its framework, and leave breakdown.json."""
    loop = seen.loop
    assert loop is not None
    loop.notes += seen.left_out()
    if ranks == 1 and loop.device.type == "cpu":  # elsewhere the other ranks are at work, as they should be
        cores = others()
        if sum(cores.values()) > LITTLE:
            loop.notes.append(f"{told(cores)} at work beside it: profile it again on a quiet machine")
    loop.conclude(show=True)
    for row in loop.bottlenecks:
        row["in_words"] = change_in_words(row["change"], seen.framework)
        print(f"{row['cause']}, in {seen.framework}: {row['in_words'] or row['change']}")
    if loop.nothing_stands_out and ranks == 1:  # operators may be at work, or wait for another rank
        switched_on: Change = {"fused_optimizer": all(group.get("fused") for group in loop.optimizer.param_groups)}
        formats = loop.observer.facts.trace.products_s
        if formats and max(formats, key=formats.__getitem__) == "bf16":
            switched_on["precision"] = "bf16"
        if compilations():
            switched_on["compile"] = "default"
        print(next_levers(plan_of([switched_on]), loop.breakdown.rows, str(loop.device)))
    if against is not None:
        print(difference(against, loop.breakdown.as_dict()))
    facts = {
        "script": path.name,
        "framework": seen.framework,
        "bottlenecks": loop.bottlenecks,
        "notes": loop.notes,
        "growth": loop.growth.as_dict(),
        "exchange_s": loop.breakdown.facts.trace.exchange_s,
    }
    write_json(seen.folder / "breakdown.json", loop.breakdown.as_dict() | facts)
    print(f"breakdown.json in {seen.folder}", flush=True)
    of_ranks = [*seen.folder.parent.glob("rank*/breakdown.json")]
    if 1 < ranks == len(of_ranks):  # the last of them has it
        print(waited_for(sorted(of_ranks)), flush=True)


def waited_for(breakdowns: Sequence[Path]) -> str:
    """Return in a sentence for which rank the others wait: the one that spends the least time in exchanges."""
    exchanges = {path.parent.name: read_json(path)["exchange_s"] for path in breakdowns}
    last, first = min(exchanges, key=exchanges.__getitem__), max(exchanges, key=exchanges.__getitem__)
    each = f"{1e3 * exchanges[last]:.4g} ms a step in exchanges, {first} {1e3 * exchanges[first]:.4g}"
    return f"the other ranks wait for {last}, which arrives last: it spends {each}"


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
