"""Samples to batches on the device: live through a loader, or gathered from a cache."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing import active_children
from typing import Any

import torch
from torch import Tensor

from speedkit.data.cache import FeatureCache
from speedkit.data.samples import EpochOrder, Samples, make_loader
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

BAD_SHARE = 0.05  # with more unreadable files than this, what is learned is no longer what was asked


class Batches:
    """An endless stream of batches on the device: `next()` gives one, epoch after epoch.

    `epoch` and `position` say where the next batch comes from; setting them before the first `next()` resumes there.
    A `seed` of None keeps the items in order (evaluation).
    """

    def __init__(
        self, workload: Any, items: Sequence[Any], plan: Plan, batch_size: int, seed: int | None, device: torch.device,
        cache: FeatureCache | None = None,
    ):  # fmt: skip
        self.device, self.plan, self.cache = device, plan, cache
        self.count = len(cache) if cache is not None else len(items)
        if not self.count:
            raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
        self.order = EpochOrder(self.count, batch_size, seed, plan.drop_last and seed is not None)
        self.epoch, self.position = 0, 0
        self.bad: dict[str, str] = {}
        self._quarantine(cache.bad if cache is not None else {})
        self.pids: list[int] = []
        self.loader = None if cache is not None else make_loader(Samples(workload, items), plan, self.order)
        self.pass_: Iterator[tuple[Tensor, ...]] | None = None

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch, each tensor `[B, ...]` on the device."""
        while True:
            if self.pass_ is None:
                self.order.epoch, self.order.start = self.epoch, self.position
                self.pass_ = self._gathered() if self.cache is not None else self._loaded()
            for batch in self.pass_:
                self.position += 1
                return batch
            self.pass_, self.epoch, self.position = None, self.epoch + 1, 0

    def one_pass(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of one pass from the start, each tensor `[B, ...]` on the device."""
        self.order.epoch = self.order.start = 0
        return self._gathered() if self.cache is not None else self._loaded()

    def _gathered(self) -> Iterator[tuple[Tensor, ...]]:
        assert self.cache is not None
        for indices in self.order.tensors():
            batch = self.cache.gather(indices, self.device)
            if len(batch[0]):
                yield batch
            else:
                self.position += 1

    def _loaded(self) -> Iterator[tuple[Tensor, ...]]:
        assert self.loader is not None
        before = set(active_children())
        passing = iter(self.loader)
        started = [process.pid for process in active_children() if process not in before]
        self.pids = [pid for pid in started if pid] or self.pids  # none are started where they persist
        try:
            for batch, _, bad in passing:
                if bad:
                    self._quarantine({item.path: item.why for item in bad})
                if batch is None:
                    self.position += 1
                    continue
                yield tuple(tensor.to(self.device, non_blocking=self.plan.pin_memory) for tensor in batch)
        finally:
            del passing  # ends its processes, also where a traceback keeps this frame alive

    def _quarantine(self, bad: dict[str, str]) -> None:
        self.bad.update(bad)
        if len(self.bad) > BAD_SHARE * self.count:
            path, why = next(iter(self.bad.items()))
            raise SpeedkitError(
                f"{len(self.bad)} of {self.count} files cannot be read, more than {BAD_SHARE:.0%} of them; "
                f"the first is {path}: {why}. Mend or remove them"
            )

    def signal_workers(self, number: int) -> None:
        """Send a signal to every loader process: SIGSTOP keeps them from working while another plan is timed."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End the loader's processes."""
        self.signal_workers(signal.SIGCONT)
        self.pass_, self.loader, self.pids = None, None, []
