"""The batches of a script's loop: its own, or those of another DataLoader over the same data set."""

import contextlib
import copy
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from speedkit.data.batches import kill, set_running, workers_of
from speedkit.data.own_loader import LOADER_OPTIONS, MemoryDataset, is_plain, own_way, why_not_kept
from speedkit.lab.script.profile import takes_from
from speedkit.lab.script.random_states import RandomStates, random_states, restore_random
from speedkit.machine import Hardware
from speedkit.measure.optimizations import Change
from speedkit.measure.optimizations import workers as workers_for
from speedkit.measure.profile import LoopProfile
from speedkit.measure.timeline import EVALUATION
from speedkit.plan import Plan

Candidate = tuple[str, Change, str]  # the optimization, the fields of a plan, why they cannot be tried or ""
KEPT_BATCHES = 16  # of which the samples are kept, to know what all would give
KEPT_S = 5.0  # no more are made after so many seconds
COPIED = ("collate_fn", "worker_init_fn", "multiprocessing_context")


class Endless:
    """The indices of a sampler, epoch after epoch: no worker starts anew between them."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Feed:
    """The batches of a loop, by the fields of a plan that are about loading. `record` and `replay` are for a test."""

    fields = (*LOADER_OPTIONS, "cache")

    def __init__(self, loop: LoopProfile, loaders: dict[int, DataLoader], hardware: Hardware) -> None:
        self.loop = loop
        self.loaders = loaders  # of all iterators of the script's
        self.hardware = hardware
        self.loader = loop.loader
        self.streams: dict[tuple[Any, ...], Iterator[Any]] = {}  # by their settings
        self.stream: Iterator[Any] | None = None  # that is switched on
        self.own: Any = None  # the script's latest iterator
        self.mixed = False  # batches of several
        self.instead: Counter[int] = Counter()  # batches in the place of those of the script's iterators
        self.record: list[tuple[Any, RandomStates]] | None = None
        self.replay: deque[tuple[Any, RandomStates]] | None = None

    # ---- what can be tried ----

    def candidates(self) -> Iterator[Candidate]:
        """Yield what of loading can be tried."""
        own = {field: getattr(self.loader, option, None) for field, option in LOADER_OPTIONS.items()}
        [workers] = workers_for(Plan(), self.hardware)
        yield "workers", workers, self._why_no_workers(own["workers"], workers["workers"])
        kept: Change = {"cache": "ram", "workers": 0, "persistent_workers": False}
        yield "cache", kept, self._why_not_loaded() or self._why_not_kept()
        if self.hardware.device.type == "cuda":
            pinned = "the loader pins its batches already" if own["pin_memory"] else ""
            yield "prefetch", {"pin_memory": True}, self._why_not_loaded() or pinned

    def _why_not_loaded(self) -> str:
        if self.loader is None:
            return "the loop takes its batches from no DataLoader"
        if isinstance(self.loader.dataset, IterableDataset):
            return "its data set is a stream, of which no second loader can be made"
        return "" if is_plain(self.loader) else own_way(self.loader)

    def _why_no_workers(self, own: int | None, count: int) -> str:
        if why := self._why_not_loaded():
            return why
        return f"the loader has {count} workers already" if own == count else ""

    def _why_not_kept(self) -> str:
        if self.loader.batch_sampler is None:
            return "its data set makes whole batches"
        try:
            return why_not_kept(self.loader)
        except Exception as error:  # of a data set that only a worker opens, say
            return f"this process cannot make a sample: {type(error).__name__}: {error}"

    # ---- what is switched on ----

    def set(self, wanted: Change) -> None:
        """Take batches by the `wanted` fields of a plan, none of them as the script takes them."""
        key = tuple(sorted(wanted.items()))
        self._stand_still()
        self.stream = None
        if wanted:
            if key not in self.streams:
                self.streams[key] = iter(self._loader(wanted))
            self.stream = self.streams[key]
        at_work = self.own if self.stream is None else self.stream
        set_running(getattr(at_work, "_workers", []), True)

    def _stand_still(self) -> None:
        """Stop the workers of all loaders: in another's turn they neither compute nor gain a stock."""
        for batches in (self.own, *self.streams.values()):
            set_running(getattr(batches, "_workers", []), False)

    def _loader(self, wanted: Change) -> DataLoader:
        loader = self.loader
        options: dict[str, Any] = {option: getattr(loader, option) for option in (*COPIED, *LOADER_OPTIONS.values())}
        options |= {LOADER_OPTIONS[field]: wanted[field] for field in LOADER_OPTIONS if field in wanted}
        options["prefetch_factor"] = 2
        if not options["num_workers"]:
            unused = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
            options = {name: value for name, value in options.items() if name not in unused}
        elif sys.platform == "linux":
            options["multiprocessing_context"] = options["multiprocessing_context"] or "fork"
        dataset = loader.dataset
        if wanted.get("cache", "off") != "off":
            dataset = MemoryDataset(dataset)
            return DataLoader(dataset, batch_sampler=Endless(self._kept(dataset)), **options)
        if loader.batch_sampler is None:
            return DataLoader(dataset, batch_size=None, sampler=Endless(loader.sampler), **options)
        return DataLoader(dataset, batch_sampler=Endless(loader.batch_sampler), **options)

    def _kept(self, dataset: MemoryDataset) -> list[Any]:
        """Return the indices of some batches, whose samples are in memory afterwards."""
        until_s = time.perf_counter() + KEPT_S
        batches = []
        for indices in itertools.islice(self.loader.batch_sampler, KEPT_BATCHES):
            for index in indices:
                _ = dataset[index]
            batches.append(indices)
            if time.perf_counter() > until_s:
                break
        return batches

    def close(self) -> None:
        """End the workers of all loaders but the script's own, which go on."""
        for batches in self.streams.values():
            kill(workers_of(batches))
        set_running(getattr(self.own, "_workers", []), True)
        self.streams.clear()
        self.stream = None

    # ---- the script's thread ----

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Give the script its batches inside."""
        with (
            patch.object(DataLoader, "__iter__", self._iterator(DataLoader.__iter__)),
            patch.object(_BaseDataLoaderIter, "__next__", self._next(_BaseDataLoaderIter.__next__)),
        ):
            yield

    def _iterator(self, iterate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterator(loader: Any) -> Any:
            """Return the loader's iterator; the time that it takes to start is none of a step's."""
            if not takes_from(self.loop, loader):
                return iterate(loader)
            set_running(getattr(self.own, "_workers", []), True)
            self.loop.timeline.begin(EVALUATION)
            try:
                self.own = iterate(loader)
            finally:
                self.loop.timeline.end()
            self.instead[id(self.own)] = 0
            return self.own

        return iterator

    def _next(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(batches: Any) -> Any:
            """Return the next batch; an epoch has as many as ever, whoever makes them."""
            if not takes_from(self.loop, self.loaders.get(id(batches))):
                return fetch(batches)
            self.own = batches
            self.mixed |= self.stream is not None or self.replay is not None
            if self.mixed and self._ended(batches):
                raise StopIteration
            first = not self._given(batches)
            self.instead[id(batches)] += bool(self.replay) or self.stream is not None
            if self.replay:
                kept, states = self.loop.next_batch(deque.popleft, self.replay)
                batch = copy.deepcopy(kept)
                restore_random(states)  # which an epoch that begins elsewhere would leave another
            elif self.stream is not None:
                batch = self.loop.next_batch(next, self.stream)
            elif first and batches._num_workers:
                batch = self.loop.timeline.timed(EVALUATION, fetch)(batches)  # workers have begun just now
            else:
                batch = fetch(batches)
            if self.record is not None:
                kept = copy.deepcopy(batch)  # the loop may work in place, or take parts out
                self.record.append((kept, random_states()))
            return batch

        return next_batch

    def _ended(self, batches: Any) -> bool:
        with contextlib.suppress(TypeError):  # of a stream, without a length
            return self._given(batches) >= len(self.loader)
        return False

    def _given(self, batches: Any) -> int:
        """Return how many batches of its epoch the script has got, those before the tuning began included."""
        return int(batches._num_yielded) + self.instead[id(batches)]


@contextlib.contextmanager
def asynchronous_copies() -> Iterator[None]:
    """Let copies to a GPU inside go on beside the host, as those of pinned batches can."""
    with contextlib.ExitStack() as stack:
        for name in ("to", "cuda"):
            stack.enter_context(patch.object(torch.Tensor, name, _beside(getattr(torch.Tensor, name))))
        yield


def _beside(copy: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu" and tensor.is_pinned() and not any(isinstance(word, bool) for word in args):
            kwargs["non_blocking"] = True
        return copy(tensor, *args, **kwargs)

    return call
