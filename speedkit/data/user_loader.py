"""Batches from a loader that its author keeps: any nesting of tensors, and the same ones for every plan."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from speedkit.data.sampler import BatchSampler
from speedkit.data.workers import set_running
from speedkit.errors import UsageError
from speedkit.plan import Plan

# The fields that a DataLoader has too, and its names for them.
LOADER_OPTIONS = {"workers": "num_workers"} | {
    name: name for name in ("persistent_workers", "prefetch_factor", "pin_memory", "drop_last")
}
COPIED_OPTIONS = ("collate_fn", "generator", "worker_init_fn", "timeout", "multiprocessing_context", "in_order")
OF_ITEMS = ("cache", "decoder", "features_on", "shards", "bucket", "worker_kind", "ranks")  # fields, as below
DEFAULTS = dataclasses.asdict(Plan())
WITHOUT_LENGTH = 20  # batches to test on, of a loader that does not say how many it has
CONSTANTS = int | float | None  # in a batch: they hold for each part of it
Case = tuple[str, Any, bool, str]  # a field, what it is instead, when, and why


# ---- batches ----


class NestedBatch(tuple[Tensor, ...]):
    """The tensors of a batch of any form, one that counts the samples first; `value` has their form."""

    others: list[Any]  # the leaves of the form, None where a tensor belongs
    places: list[int]  # of the tensors among the leaves
    spec: TreeSpec

    def like(self, tensors: Iterable[Tensor]) -> "NestedBatch":
        """Return a batch of other `tensors` in the same form."""
        batch = NestedBatch(tensors)
        vars(batch).update(vars(self))
        return batch

    @property
    def value(self) -> Any:
        """The batch in the form in which its loader made it."""
        leaves = list(self.others)
        for place, tensor in zip(self.places, self, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.spec)

    @property
    def splits(self) -> bool:
        """Whether parts of it are batches too: all tensors count the samples first, and nothing else could."""
        same = all(tensor.shape[:1] == self[0].shape[:1] for tensor in self)
        return same and all(isinstance(other, CONSTANTS) for other in self.others)


def nested(value: Any) -> NestedBatch:
    """Return the batch of a `value` of any structure that torch's pytree knows, mappings added.

    Raises UsageError where it holds no tensor [B, ...].
    """
    leaves, spec = tree_flatten(value)
    if kinds := {type(leaf) for leaf in leaves if isinstance(leaf, Mapping)}:  # such as what a tokenizer returns
        for kind in kinds:
            join = functools.partial(_mapping, kind)
            register_pytree_node(kind, lambda mapping: ([*mapping.values()], [*mapping]), join)
        return nested(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    places.sort(key=lambda place: leaves[place].ndim == 0)
    if not places or not leaves[places[0]].ndim:
        what = f"a batch ({type(value).__name__}) holds no tensor [B, ...]"
        raise UsageError(f"{what}: the loader has to give tensors, in tuples, lists or dicts")
    batch = NestedBatch(leaves[place] for place in places)
    batch.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    batch.places, batch.spec = places, spec
    return batch


def _mapping(kind: Any, values: Iterable[Any], keys: Any) -> Any:
    return kind(dict(zip(keys, values, strict=True)))


def like(batch: tuple[Tensor, ...], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return `tensors` as a batch of the same form."""
    return batch.like(tensors) if isinstance(batch, NestedBatch) else tuple(tensors)


# ---- what of a plan a loader can do ----


def is_plain(loader: Any) -> bool:
    """Return whether a loader is a DataLoader that can be made again with other settings."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def with_own_settings(plan: Plan, loader: Any) -> Plan:
    """Return `plan` with what the loader's author has set, in the fields that it leaves at their defaults."""
    own = {field: getattr(loader, option, None) for field, option in LOADER_OPTIONS.items()}
    unset = {field: value for field, value in own.items() if value and getattr(plan, field) == DEFAULTS[field]}
    return dataclasses.replace(plan, **unset)


def loader_cases(loader: Any) -> list[Case]:
    """Return what a loader cannot do of a plan."""
    why = f"a {type(loader).__name__} makes its batches in its own way"
    own = {field: getattr(loader, option, None) or DEFAULTS[field] for field, option in LOADER_OPTIONS.items()}
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)  # each worker would give all of it
    return [
        *((field, value, not is_plain(loader), why) for field, value in own.items()),
        ("workers", own["workers"], streams, "how many your data set can take you know: give your loader a number"),
    ]


def loader_options(loader: DataLoader, plan: Plan) -> dict[str, Any]:
    """Return the arguments of a DataLoader that is as `loader` is, with the settings of `plan`."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in COPIED_OPTIONS}
    options |= {option: getattr(plan, field) for field, option in LOADER_OPTIONS.items()}
    if not options["num_workers"]:
        options |= {"prefetch_factor": None, "persistent_workers": False}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return options | {"batch_sampler": loader.batch_sampler}
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return options | {"batch_size": loader.batch_size, "sampler": sampler}


# ---- its batches as those of a workload ----


@dataclasses.dataclass(frozen=True, eq=False)
class LoaderItems:
    """The samples of a loader in the place of a workload's items: there is no more to know than their number."""

    make: Callable[[int], Any]  # seed -> loader
    loader: Any  # one that was made
    batches: int | None  # of an epoch
    batch_size: int
    splits: bool

    def __len__(self) -> int:
        return (self.batches or 1) * self.batch_size

    def __getitem__(self, index: Any) -> NoReturn:
        raise UsageError("a loader gives whole batches: this takes single items, which from_dataset has")

    def with_own_settings(self, plan: Plan) -> Plan:
        """Return `plan` with what the loader's author has set, in the fields that it leaves at their defaults."""
        return with_own_settings(plan, self.loader)

    def cases(self) -> list[Case]:
        """Return what of a plan is not for such samples."""
        why = "your loader gives whole batches, made in its own way"
        whole = "not all tensors of a batch count its samples first, so it cannot be split"
        return [
            *((field, DEFAULTS[field], True, why) for field in OF_ITEMS),
            ("micro_batch", None, not self.splits, whole),
            ("compile_scope", "model", True, "your step may do what cannot be compiled with the model"),
            *loader_cases(self.loader),
        ]


class LoaderSource:
    """Goes over a loader's batches for a BatchStream, as a BatchLoader goes over its own.

    An epoch is a function of its seed and number: torch's random numbers are drawn from a state of its own. Where a run
    goes on in the middle of an epoch, the batches before are made and passed over.
    """

    def __init__(self, items: LoaderItems, sampler: BatchSampler, plan: Plan):
        self.items, self.sampler, self.plan = items, sampler, plan
        self.loader: Any = None
        self.iterator: Iterator[Any] = iter(())
        self.maker = items  # which makes no batch again

    def __iter__(self) -> Generator[tuple[NestedBatch, dict[str, str]], None, None]:
        training, seed = self.sampler.seed is not None, (self.sampler.seed or 0) * 1_000_003 + self.sampler.epoch
        if self.loader is None or isinstance(self.loader, Iterator):
            self.loader = self.items.make(seed)
            if training and is_plain(self.loader):
                self.loader = DataLoader(self.loader.dataset, **loader_options(self.loader, self.plan))
        if getattr(self.loader, "generator", None) is not None:
            self.loader.generator.manual_seed(seed)
        state, end = torch.Generator().manual_seed(seed).get_state(), object()
        for number in itertools.count() if training else range(self.items.batches or WITHOUT_LENGTH):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                if number == 0:
                    self.iterator = iter(self.loader)
                batch = next(self.iterator, end)
                state = torch.get_rng_state()
            if batch is end and number == 0:
                raise UsageError("the loader ends before its first batch: for each epoch it has to give all of them")
            if batch is end:
                break
            if number >= self.sampler.start:
                yield nested(batch), {}
        self.iterator = iter(())

    @property
    def processes(self) -> list[Any]:
        """The loader's worker processes."""
        return getattr(self.iterator, "_workers", [])

    def set_running(self, running: bool) -> None:
        """Let the workers go on or stand still."""
        set_running(self.processes, running)

    def close(self) -> None:
        """Let the workers end."""
        self.set_running(True)
        self.loader, self.iterator = None, iter(())


def loader_items(make: Callable[[int], Any] | Iterable[Any], seed: int = 0) -> LoaderItems:
    """Return the samples of a loader, or of the loaders that a function makes of seeds, as its first batch shows them.

    Raises UsageError where there are none.
    """
    function = make if callable(make) and not isinstance(make, Iterable) else lambda _: make
    loader = function(seed)
    if not isinstance(loader, Iterable):
        raise UsageError(f"a {type(loader).__name__} is no loader: nobody can go over its batches")
    if loader is make and isinstance(loader, Iterator):
        raise UsageError("an iterator can be gone over once: give the function that makes it, from a seed")
    items = LoaderItems(function, loader, getattr(loader, "__len__", lambda: None)(), 1, True)
    source = LoaderSource(items, BatchSampler(1, 1, seed), with_own_settings(Plan(), loader))
    batch, _ = next(iter(source))
    source.close()
    return dataclasses.replace(items, batch_size=len(batch[0]), splits=batch.splits)
