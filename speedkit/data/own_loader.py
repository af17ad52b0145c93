"""Batches from a loader that its author keeps: the same ones for every plan."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from speedkit.data.batch import OwnBatch, own_batch
from speedkit.data.batches import END, HangDetector, epoch_of, set_running
from speedkit.data.sampler import BatchSampler
from speedkit.errors import UsageError
from speedkit.machine import MEMORY_SHARE, free_bytes
from speedkit.plan import Plan

# The fields that a DataLoader has too, and its names for them.
LOADER_OPTIONS = {
    "workers": "num_workers",
    "persistent_workers": "persistent_workers",
    "prefetch_factor": "prefetch_factor",
    "pin_memory": "pin_memory",
}
COPIED_OPTIONS = (
    "collate_fn",
    "drop_last",
    "generator",
    "worker_init_fn",
    "timeout",
    "multiprocessing_context",
    "in_order",
)
OF_ITEMS = ("cache", "decoder", "features_on", "bucket", "ranks")
DEFAULTS = dataclasses.asdict(Plan())
SAMPLES_COMPARED = 8  # that a data set makes twice, to see whether it draws them at random
WITHOUT_LENGTH = 20  # batches to test on, of a loader that does not say how many it has
Rule = tuple[str, Any, str]  # a field of the plan, what it is instead, and why


# ---- what of a plan a loader can do ----


def is_plain(loader: Any) -> bool:
    """Return whether a loader is a DataLoader that can be made again with other settings."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def own_way(loader: Any) -> str:
    """Return in words why a loader that is not plain stays as it is."""
    return f"a {type(loader).__name__} makes its batches in its own way"


def own_settings(loader: Any, plan: Plan) -> dict[str, Any]:
    """Return what the loader's author has set, of the fields that `plan` leaves at their defaults."""
    own = {}
    for field, option in LOADER_OPTIONS.items():
        value = getattr(loader, option, None)
        if value and getattr(plan, field) == DEFAULTS[field]:
            own[field] = value
    return own


def rules_of_loader(loader: Any) -> Iterator[Rule]:
    """Yield what a loader cannot do of a plan."""
    own = DEFAULTS | own_settings(loader, Plan())
    if not is_plain(loader):
        for field in LOADER_OPTIONS:
            yield field, own[field], own_way(loader)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):  # each worker would give all of it
        yield "workers", own["workers"], "how many your data set can take you know: give your loader a number"


def loader_options(loader: DataLoader, plan: Plan) -> dict[str, Any]:
    """Return the arguments of a DataLoader that is as `loader` is, with the settings of `plan`."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in COPIED_OPTIONS}
    options |= {option: getattr(plan, field) for field, option in LOADER_OPTIONS.items()}
    if not options["num_workers"]:
        options |= {"prefetch_factor": None, "persistent_workers": False}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return options | {"batch_sampler": loader.batch_sampler}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return options | {"batch_size": loader.batch_size}


# ---- its samples in memory ----


class MemoryDataset(Dataset):
    """A map-style data set, of which each sample is made once and then kept."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.samples: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if index not in self.samples:
            self.samples[index] = self.dataset[index]
        return self.samples[index]


def same_value(one: Any, other: Any) -> bool:
    """Return whether two leaves of samples are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other)


def why_not_kept(loader: Any) -> str:
    """Return why the samples of a loader's data set cannot be kept in memory, or ""."""
    if not is_plain(loader):
        return own_way(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "the samples of a stream have no number to find them by"
    count = min(len(loader.dataset), SAMPLES_COMPARED)
    with torch.random.fork_rng(devices=[]):
        first = tree_leaves([loader.dataset[index] for index in range(count)])
        again = tree_leaves([loader.dataset[index] for index in range(count)])
    if not all(map(same_value, first, again)):
        return "a sample made twice is not the same: what your data set draws at random belongs in the loop"
    takes = sum(getattr(leaf, "nbytes", 0) for leaf in first) * len(loader.dataset) / max(count, 1)
    if takes > MEMORY_SHARE * free_bytes(torch.device("cpu")):
        return f"its samples take {takes / 1e9:.3g} GB, more than half of the memory that is free"
    return ""


# ---- its batches as those of a workload ----


@dataclasses.dataclass(frozen=True, eq=False)
class LoaderItems:
    """The samples of a loader, in the place of a workload's items: known is no more than their number."""

    make: Callable[[int], Any]  # seed -> loader
    loader: Any  # one that was made
    batches: int | None  # of an epoch
    batch_size: int = 1
    splits: bool = True

    def __len__(self) -> int:
        return (self.batches or 1) * self.batch_size

    def __getitem__(self, index: Any) -> NoReturn:
        raise UsageError("a loader gives whole batches: single items, which this takes, are in from_dataset")

    def rules(self) -> Iterator[Rule]:
        """Yield what of a plan is not for such samples."""
        for field in OF_ITEMS:
            yield field, DEFAULTS[field], "your loader gives whole batches, and no items"
        if not self.splits:
            yield "micro_batch", None, "not all of a batch counts its samples first: it stays whole"
        yield from rules_of_loader(self.loader)


class LoaderSource:
    """Goes over a loader's batches for a BatchStream, as a BatchLoader goes over its own.

    An epoch is a function of its seed and number: torch's random numbers come from a state of its own. To go on in the
    middle of an epoch it makes the batches before, too.
    """

    def __init__(self, items: LoaderItems, sampler: BatchSampler, plan: Plan):
        self.items = items
        self.sampler = sampler
        self.plan = plan
        self.loader: Any = None
        self.generators: list[torch.Generator] = []
        self.detector = HangDetector()
        self.batches = epoch_of((), self.detector)  # of the epoch in progress

    def __iter__(self) -> Generator[tuple[OwnBatch, dict[str, str]], None, None]:
        seed = (self.sampler.seed or 0) * 1_000_003 + self.sampler.epoch
        numbers: Iterable[int] = itertools.count()
        if not self.training:
            numbers = range(self.items.batches or WITHOUT_LENGTH)
        if self.loader is None or isinstance(self.loader, Iterator):
            self.loader = self.make_loader(seed)
        for generator in self.generators:
            generator.manual_seed(seed)
        state = self.generators[0].get_state()
        self.detector = HangDetector()
        self.batches = epoch_of(self.loader, self.detector)
        for number in numbers:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                batch = next(self.batches, END)
                state = torch.get_rng_state()
            if batch is END:
                if number == 0:
                    raise UsageError(
                        "the loader ends before its first batch: for each epoch it has to give all of them"
                    )
                break
            if number >= self.sampler.start:
                yield own_batch(batch), {}
        self.batches.close()

    @property
    def training(self) -> bool:
        """Whether it goes over training batches."""
        return self.sampler.seed is not None

    def make_loader(self, seed: int) -> Any:
        """Return the loader of `seed`, a plain one with the settings of the plan; keep the generators of its epochs."""
        loader = self.items.make(seed)
        generator = torch.Generator()  # of its workers' numbers: persistent ones do not draw for each epoch
        self.generators = [generator]
        if getattr(loader, "generator", None) is not None:
            self.generators.append(loader.generator)
        if self.training and is_plain(loader):
            options = loader_options(loader, self.plan) | {"generator": generator}
            return DataLoader(loader.dataset, **options)
        return loader

    def close(self) -> None:
        """Let the workers end."""
        set_running(self.detector.processes, True)
        self.loader = None
        self.batches.close()


def loader_items(make: Any, seed: int = 0, batches: int | None = None) -> LoaderItems:
    """Return the samples of a loader, or of those that a function makes of seeds, by its first batch.

    An epoch has so many `batches` where the loader has no length. Raises UsageError where there is none.
    """
    if isinstance(make, Iterable) or not callable(make):

        def function(seed: int) -> Any:
            return make
    else:
        function = make
    loader = function(seed)
    if not isinstance(loader, Iterable) or (loader is make and isinstance(loader, Iterator)):
        what = f"{type(loader).__name__} cannot be gone over again and again"
        raise UsageError(f"{what}: give a DataLoader, or the function of a seed that makes a loader")
    items = LoaderItems(function, loader, operator.length_hint(loader) or batches)
    source = LoaderSource(items, BatchSampler(1, 1, seed), Plan(**own_settings(loader, Plan())))
    batch, _ = next(iter(source))
    source.close()
    return dataclasses.replace(items, batch_size=len(batch.inputs), splits=batch.splits)
