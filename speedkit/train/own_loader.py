"""The loader of a loop that its author keeps, made again as a plan says; its batches arrive on the device."""

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from speedkit.data.auto import SHARE, choose_workers
from speedkit.data.prefetch import prefetched
from speedkit.data.samples import Samples
from speedkit.data.workers import Loader
from speedkit.plan import Effective, Plan
from speedkit.system import usable_ram_bytes
from speedkit.train import compilation, precision
from speedkit.workloads.yours import from_dataset

DEFAULT = Plan()
PROBED = 16  # samples that are made twice, to see whether they may be kept
# Fields that say how a DataLoader is made, and its own name for each.
NAMES = {"workers": "num_workers", "persistent_workers": "persistent_workers", "prefetch_factor": "prefetch_factor",
         "pin_memory": "pin_memory", "drop_last": "drop_last"}  # fmt: skip
NUMPY = np.random  # its global generator, which data sets draw from
RANDOM: Any = ((torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate),
               (NUMPY.get_state, NUMPY.set_state))  # fmt: skip


class OnDevice:
    """The batches of a loader, made as a plan says and on the device; in all else the loader itself answers."""

    def __init__(self, theirs: Any, settled: Effective, forward: Any, device: torch.device):
        self.theirs, self.settled, self.forward, self.device, self.plan = theirs, settled, forward, device, settled.plan
        self.source = _made_again(theirs, self.plan) if _is_plain(theirs) else theirs
        self.threads = None
        if self.plan.workers and self.plan.worker_kind == "thread":
            samples = Samples(range(len(theirs.dataset)), theirs.dataset.__getitem__, None, int)
            plan = dataclasses.replace(self.plan, pin_memory=False)  # it would look for tensors: see _boxed
            self.threads = Loader(samples, self._boxed, plan, self.source.batch_sampler)

    @property
    def effective(self) -> Effective:
        """What the plan has become by now."""
        return compilation.honoured(self.settled, self.forward)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":
            raise AttributeError(name)  # a copy in the making has none yet
        return getattr(self.theirs, name)

    def __iter__(self) -> Iterator[Any]:
        kept = self.plan.persistent_workers and self.source is not self.theirs and self.source._iterator is not None
        if self.threads is not None or (kept and not self.theirs.persistent_workers):
            # A DataLoader draws a seed for new processes. So do we, and what dropout draws is the same whoever loads.
            torch.empty((), dtype=torch.int64).random_(generator=self.theirs.generator)
        source = iter(self.source) if self.threads is None else (batch for (batch,), _ in self.threads)
        return self._ahead(source) if self.plan.prefetch else map(self._moved, source)

    def _boxed(self, samples: list[Any]) -> Any:
        batch = self.theirs.collate_fn([sample for sample, _ in samples])
        return (tree_map_only(Tensor, Tensor.pin_memory, batch) if self.plan.pin_memory else batch,), []

    def _copied(self, batch: Any) -> Any:
        copied = lambda tensor: tensor.to(self.device, non_blocking=self.plan.pin_memory)  # noqa: E731
        return tree_map_only(Tensor, copied, batch)

    def _moved(self, batch: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self.device) if hasattr(leaf, "to") else leaf, self._copied(batch))

    def _ahead(self, source: Iterator[Any]) -> Iterator[Any]:
        copied = deque[Any]()

        def copy_next(batch: Any) -> tuple[Tensor, ...]:
            copied.append(self._copied(batch))
            return tuple(leaf for leaf in tree_leaves(copied[-1]) if isinstance(leaf, Tensor))

        for _ in prefetched(source, copy_next, self.device):
            yield self._moved(copied.popleft())


class Kept(Dataset):
    """The samples of a map-style data set, each made once."""

    def __init__(self, data: Any):
        self.data, self.kept = data, dict[Any, Any]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: Any) -> Any:
        """Return sample `at`."""
        if at not in self.kept:
            self.kept[at] = self.data[at]
        return self.kept[at]


def asked(loader: Any) -> dict[str, Any]:
    """Return the fields of a plan that `loader` has set by itself."""
    there = {field: getattr(loader, name) for field, name in NAMES.items()} if _is_plain(loader) else {}
    return {field: value for field, value in there.items() if value}


def fallbacks(got: dict[str, Any], loader: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield, as `plan.resolve` does inside, what `loader` cannot do: field, new value, reason."""
    if not _is_plain(loader):
        why = f"a {type(loader).__name__} makes its batches in its own way: say it there, or give a DataLoader"
        yield from ((field, getattr(DEFAULT, field), why) for field in ("cache", "prefetch", "worker_kind", *NAMES)
                    if got[field] != getattr(DEFAULT, field))  # fmt: skip
        return
    streamed, custom = isinstance(loader.dataset, IterableDataset), loader.batch_size is None
    cached, threads = got["cache"] != "off", got["worker_kind"] == "thread" and got["workers"] != 0
    why = "" if not (cached or threads) else _not_repeatable(loader)
    if why and cached:
        yield "cache", "off", why
    elif got["cache"] in ("disk", "device"):
        yield "cache", "ram", "what is kept are the samples of the data set, by the process that trains"
    for field in ("cache_of", "cache_dtype") if cached else ():
        if got[field] != getattr(DEFAULT, field):
            yield field, getattr(DEFAULT, field), "samples are kept as the data set gives them"
    if why and threads:
        yield "worker_kind", "process", why
    if streamed and got["workers"] != loader.num_workers:
        yield "workers", loader.num_workers, ("each worker would give all of an IterableDataset: let it take its part "
                                              "by get_worker_info(), and set num_workers in your loader")  # fmt: skip
    if got["workers"] == "auto" and (custom or loader.collate_fn is not default_collate):
        yield "workers", loader.num_workers, "auto knows batches that PyTorch itself puts together: give a number"
    few = not custom and not streamed and len(loader.sampler) < loader.batch_size
    if got["drop_last"] and not loader.drop_last and (custom or few):
        yield "drop_last", False, "no batch would be left" if few else "the loader's batch_sampler decides on that"


def _is_plain(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _not_repeatable(loader: Any) -> str:
    """Return why the samples of the loader's data set may not be kept, or made in any order; "" where they may."""
    data = loader.dataset
    if isinstance(data, IterableDataset):
        return "an IterableDataset has no items by index"
    if loader.batch_sampler is None:
        return "without batches (batch_size=None) the loop would get, and might change, what is kept"
    before = [get() for get, _ in RANDOM]
    probed = range(0, len(data), max(1, len(data) // PROBED))
    first = [copy.deepcopy(data[at]) for at in probed]
    drew = _bits(before) != _bits([get() for get, _ in RANDOM])
    again = [data[at] for at in probed]
    same = _bits(first) == _bits(again)
    loader.collate_fn(again)
    for (_, put), state in zip(RANDOM, before, strict=True):
        put(state)
    if drew or not same:
        return ("the data set augments at random, so that no item is the same twice: let it give what comes before "
                "that, and augment whole batches in your loop")  # fmt: skip
    if _bits(first) != _bits(again):
        return "collate_fn changes the samples that it is given: let it copy them"
    size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(first)) * len(data) / max(1, len(probed))
    room = SHARE * usable_ram_bytes()
    return f"all samples take {size / 1e9:.1f} GB, of {room / 1e9:.1f} GB that they may" if size > room else ""


def _bits(tree: Any) -> list[Any]:
    """Return what tells the leaves of `tree` from others: of tensors and arrays each bit, NaN too."""
    leaves = [leaf.cpu().contiguous().flatten().view(torch.uint8).numpy() if isinstance(leaf, Tensor) else leaf
              for leaf in tree_leaves(tree)]  # fmt: skip
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray | np.generic) else leaf
            for leaf in leaves]  # fmt: skip


def measured(plan: Plan, model: nn.Module, loader: Any, device: torch.device) -> tuple[Plan, str]:
    """Return `plan` with the workers that suit steps of a copy of `model` on the loader's data, and the reason."""
    twin, few = copy.deepcopy(model), Subset(loader.dataset, range(min(len(loader.dataset), 64 * loader.batch_size)))

    def compute(batch: tuple[Tensor, ...]) -> None:
        twin.zero_grad()
        with precision.autocast(plan, device) or torch.autocast(device.type, enabled=False):
            outputs = [leaf for leaf in tree_leaves(twin(batch[0])) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.stack([output.float().mean() for output in outputs]).sum().backward()

    try:
        workload = from_dataset(twin, few, few, score=lambda outputs, targets: targets)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return choose_workers(workload, workload.train, plan, loader.batch_size, device, compute)
    except Exception as error:  # whatever a model says that is not called with its input alone
        why = f"auto takes a model of one input, and items that are (input, target): {str(error)[:200]}"
        return dataclasses.replace(plan, workers=loader.num_workers), why


def _made_again(loader: Any, plan: Plan) -> DataLoader:
    """Return the loader as `plan` has it: itself, where that is how it is."""
    workers = 0 if plan.worker_kind == "thread" else plan.workers
    made = {name: getattr(plan, field) for field, name in NAMES.items()} | {"num_workers": workers}
    if not workers:
        made |= {"persistent_workers": False, "prefetch_factor": None}
    if plan.cache == "off" and all(getattr(loader, name) == value for name, value in made.items()):
        return loader
    taken = ["collate_fn", "worker_init_fn", "generator", "in_order"]
    taken += ["timeout", "multiprocessing_context"] if workers else []
    if loader.batch_size is None:
        del made["drop_last"]
    if loader.batch_size is None and loader.batch_sampler is not None:
        taken += ["batch_sampler"]
    else:
        taken += ["batch_size"] if isinstance(loader.dataset, IterableDataset) else ["batch_size", "sampler"]
    data = Kept(loader.dataset) if plan.cache != "off" else loader.dataset
    return DataLoader(data, **made, **{name: getattr(loader, name) for name in taken})
