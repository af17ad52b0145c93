"""The loader of a loop that its author keeps, made again as a plan says; its batches arrive on the device."""

import copy
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from speedkit.data.prefetch import prefetched
from speedkit.plan import EffectivePlan, Plan
from speedkit.system import usable_ram_bytes
from speedkit.train import compilation

DEFAULT = dataclasses.asdict(Plan())
PROBED = 16  # samples that are made twice, to see whether they may be kept
# Fields that say how a DataLoader is made, and its own name for each.
NAMES = {
    "workers": "num_workers",
    "persistent_workers": "persistent_workers",
    "prefetch_factor": "prefetch_factor",
    "pin_memory": "pin_memory",
    "drop_last": "drop_last",
}
RANDOM: Any = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


class OnDevice:
    """The batches of a loader, made as a plan says and on the device; in all else the loader itself answers."""

    def __init__(self, theirs: Any, settled: EffectivePlan, forward: Any, device: torch.device):
        self.theirs, self.settled, self.forward, self.device, self.plan = theirs, settled, forward, device, settled.plan
        self.source = _made_again(theirs, self.plan) if _is_plain(theirs) else theirs

    @property
    def effective(self) -> EffectivePlan:
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
        if kept and not self.theirs.persistent_workers:
            # A DataLoader draws a seed for new processes. So do we, and what dropout draws is the same whoever loads.
            torch.empty((), dtype=torch.int64).random_(generator=self.theirs.generator)
        return self._ahead(iter(self.source)) if self.plan.prefetch else map(self._moved, self.source)

    def _copied(self, batch: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device, non_blocking=self.plan.pin_memory), batch)

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
        self.data, self.sample = data, functools.cache(data.__getitem__)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: Any) -> Any:
        """Return sample `at`."""
        return self.sample(at)


def asked(loader: Any) -> dict[str, Any]:
    """Return the fields of a plan that `loader` has set by itself."""
    names = NAMES if _is_plain(loader) else {}
    return {field: value for field, name in names.items() if (value := getattr(loader, name))}


def different(got: dict[str, Any], whys: dict[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, its default, why) for each field of `whys` that is not at its default."""
    return ((field, DEFAULT[field], why) for field, why in whys.items() if got[field] != DEFAULT[field])


def fallbacks(got: dict[str, Any], loader: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield, as `plan.resolve` does inside, what `loader` cannot do: field, new value, reason."""
    if not _is_plain(loader):
        why = f"a {type(loader).__name__} makes its batches in its own way: say it there, or give a DataLoader"
        yield from different(got, dict.fromkeys(("cache", "prefetch", *NAMES), why))
        return
    streamed, custom = isinstance(loader.dataset, IterableDataset), loader.batch_size is None
    cached = got["cache"] != "off"
    if cached and (why := _not_repeatable(loader)):
        yield "cache", "off", why
    elif got["cache"] in ("disk", "device"):
        yield "cache", "ram", "what is kept are the samples of the data set, by the process that trains"
    if cached:
        kept = "samples are kept as the data set gives them"
        yield from different(got, {"cache_of": kept, "cache_dtype": kept})
    if streamed and got["workers"] != loader.num_workers:
        yield (
            "workers",
            loader.num_workers,
            (
                "each worker would give all of an IterableDataset: let it take its part "
                "by get_worker_info(), and set num_workers in your loader"
            ),
        )
    elif got["workers"] == "auto":
        yield "workers", loader.num_workers, "auto times steps of fit: give a number, as speedkit.watch advises"
    few = not custom and not streamed and len(loader.sampler) < loader.batch_size
    if got["drop_last"] and not loader.drop_last and (custom or few):
        yield "drop_last", False, "no batch would be left" if few else "the loader's batch_sampler decides on that"


def _is_plain(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _not_repeatable(loader: Any) -> str:
    """Return why the samples of the loader's data set may not be kept; "" where they may."""
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
        return (
            "the data set augments at random, so that no item is the same twice: let it give what comes before "
            "that, and augment whole batches in your loop"
        )
    if _bits(first) != _bits(again):
        return "collate_fn changes the samples that it is given: let it copy them"
    size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(first)) * len(data) / max(1, len(probed))
    room = 0.5 * usable_ram_bytes()
    return f"all samples take {size / 1e9:.1f} GB, of {room / 1e9:.1f} GB that they may" if size > room else ""


def _bits(tree: Any) -> list[Any]:
    """Return what tells the leaves of `tree` from others: of tensors and arrays each bit, NaN too."""
    arrays = tree_map_only(Tensor, lambda leaf: leaf.cpu().contiguous().flatten().view(torch.uint8).numpy(), tree)
    return [
        (leaf.dtype, leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray | np.generic) else leaf
        for leaf in tree_leaves(arrays)
    ]


def _made_again(loader: Any, plan: Plan) -> DataLoader:
    """Return the loader as `plan` has it: itself, where that is how it is."""
    made = {name: getattr(plan, field) for field, name in NAMES.items()}
    if not plan.workers:
        made |= {"persistent_workers": False, "prefetch_factor": None}
    if plan.cache == "off" and all(getattr(loader, name) == value for name, value in made.items()):
        return loader
    taken = ["collate_fn", "worker_init_fn", "generator", "in_order"]
    taken += ["timeout", "multiprocessing_context"] if plan.workers else []
    if loader.batch_size is None:
        del made["drop_last"]
    if loader.batch_size is None and loader.batch_sampler is not None:
        taken += ["batch_sampler"]
    else:
        taken += ["batch_size"] if isinstance(loader.dataset, IterableDataset) else ["batch_size", "sampler"]
    data = Kept(loader.dataset) if plan.cache != "off" else loader.dataset
    return DataLoader(data, **made, **{name: getattr(loader, name) for name in taken})
