"""Samples to batches on the device: live through a loader, or gathered from a cache."""

import dataclasses
import functools
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from speedkit.data.bucket import padding_share
from speedkit.data.cache import FeatureCache
from speedkit.data.decode import BadItem
from speedkit.data.prefetch import Batch, prefetched
from speedkit.data.samples import EpochOrder, Samples, collate, loading
from speedkit.data.workers import Loader
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

BAD_SHARE = 0.05  # with more unreadable files than this, what is learned is no longer what was asked


class BatchStream:
    """An endless stream of batches on the device: `next()` gives one, epoch after epoch.

    `epoch` and `position` say where the next batch comes from; setting them before the first `next()` resumes there.
    A `seed` of None keeps the items in order (evaluation).
    """

    def __init__(
        self,
        workload: Any,
        items: Sequence[Any],
        plan: Plan,
        batch_size: int,
        seed: int | None,
        device: torch.device,
        cache: FeatureCache | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        self.workload, self.device, self.plan, self.cache, self.seed = workload, device, plan, cache, seed
        if not items:
            raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
        varies, training = workload.length is not None, seed is not None
        self.order = EpochOrder(len(items), batch_size, seed, plan.drop_last and training)
        self.padding = ""  # what bucketing saves, as a sentence
        if plan.bucket and training and varies:
            lengths = torch.tensor([workload.length(item) for item in items])
            without = padding_share(self.order.tensors(), lengths)
            self.order = EpochOrder(len(items), batch_size, seed, plan.drop_last, lengths)
            padding = padding_share(self.order.tensors(), lengths, self.order.padded)
            self.padding = f"bucket: {padding:.1%} of the frames are padding, {without:.1%} without"
        self.order.rank, self.order.ranks = share
        self.stood_in = (0, 0)  # epoch and position of a batch in place of one of unreadable items alone
        self.epoch, self.position = 0, 0
        # Whether what arrives on the device are waveforms, whose features are computed there.
        self.waveforms = plan.cache_of == "waveform" if cache is not None else plan.features_on == "device"
        self.remade = self.waveforms or self.order.padded is not None
        self.generator = torch.Generator(device=device)
        features = None if self.waveforms else workload.features
        self.samples = Samples(items, loading(workload, plan), features, workload.target)
        self.loader = Loader(self.samples, functools.partial(collate, varies=varies), plan, self.order)
        self.pass_: Iterator[Batch] | None = None
        self.bad: dict[str, str] = {}
        self._quarantine(cache.bad if cache is not None else {})

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch, each tensor `[B, ...]` on the device."""
        while True:
            if self.pass_ is None:
                self.order.epoch, self.order.start = self.epoch, self.position
                self.pass_ = self._fetched()
            for batch in self.pass_:
                self.position += 1
                if batch is None:
                    batch = self._stand_in(self.epoch, self.position)
                if batch is not None:
                    return self._ready(batch, self.epoch * len(self.order) + self.position) if self.remade else batch
            self.pass_, self.epoch, self.position = None, self.epoch + 1, 0

    def again(self, epoch: int, position: int) -> tuple[tuple[Tensor, ...] | None, list[str]]:
        """Return the batch after which `epoch` and `position` were these, made once more in this process.

        And the names of its items. Nothing of the stream itself moves. Readable items alone are in both.
        """
        indices = next(dataclasses.replace(self.order, epoch=epoch, start=position - 1).tensors())
        if self.cache is not None:
            indices = indices[torch.from_numpy(self.cache.usable)[indices]]
            batch = self.cache.gather(indices, self.device)
        else:
            samples = dataclasses.replace(self.samples, reading=[-1])  # the workers' notes are theirs
            made = samples.__getitems__(indices.tolist())
            indices = indices[torch.tensor([not isinstance(sample, BadItem) for sample in made])]
            batch = self.loader.collate(made)[0]
        names = [str(getattr(item, "path", item)) for item in map(self.samples.items.__getitem__, indices.tolist())]
        if not batch:
            return None, names
        batch = tuple(tensor.to(self.device) for tensor in batch)
        step = epoch * len(self.order) + position
        return (self._ready(batch, step) if self.remade else batch), names

    def one_pass(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of one pass from the start, each tensor `[B, ...]` on the device."""
        self.order.epoch = self.order.start = 0
        return (
            self._ready(batch, step)
            for step, made in enumerate(self._fetched(), 1)
            if (batch := made or self._stand_in(0, step)) is not None
        )

    def counts(self, epoch: int, position: int) -> bool:
        """Whether the batch after which `epoch` and `position` were these is for learning, and not for the others."""
        return not self.order.spare(position) and self.stood_in != (epoch, position)

    def _stand_in(self, epoch: int, position: int) -> Batch:
        """Return any readable sample where several ranks wait for this one's part of a batch, else None."""
        if self.order.ranks == 1:
            return None
        self.stood_in = (epoch, position)
        samples = dataclasses.replace(self.samples, reading=[-1])
        for index in range(self.order.count):
            if self.cache is not None:
                batch = self._gathered(self.cache, torch.tensor([index]))
            else:
                batch = self.loader.collate(samples.__getitems__([index]))[0]
            if batch is not None and len(batch[0]):
                return tuple(tensor.to(self.device) for tensor in batch)
        return None

    def _fetched(self) -> Iterator[Batch]:
        """Yield the batches of a pass as they arrive on the device; None for one of unreadable items alone."""
        source: Iterator[Any] = self.order.tensors() if self.cache is not None else iter(self.loader)
        if self.plan.prefetch and self.device.type == "cuda":
            return prefetched(source, self._arrived, self.device)
        return map(self._arrived, source)

    def _arrived(self, made: Any) -> Batch:
        """Return the batch of these indices out of the cache, or the one that the loader made, on the device."""
        if self.cache is not None:
            return self._gathered(self.cache, made)
        batch, bad = made
        self._quarantine({item.path: item.why for item in bad})
        return batch and tuple(tensor.to(self.device, non_blocking=self.plan.pin_memory) for tensor in batch)

    def _gathered(self, cache: FeatureCache, indices: Tensor) -> Batch:
        """Return the batch of the usable ones of the items at `indices`; None where none is."""
        batch = cache.gather(indices[torch.from_numpy(cache.usable)[indices]], self.device)
        return batch if len(batch[0]) else None

    def _ready(self, batch: tuple[Tensor, ...], step: int) -> tuple[Tensor, ...]:
        """Return what the loss takes of what has arrived: features, padded to one of few lengths where bucketed."""
        inputs, *rest = batch
        if self.waveforms:
            if self.workload.augment_waveform is not None and self.seed is not None:
                # Seeded by the step, so that a resumed run draws what the uninterrupted one would have drawn.
                self.generator.manual_seed(self.seed * 1_000_033 + step + self.order.own_draws)
                inputs = self.workload.augment_waveform(inputs, self.generator)
            with torch.no_grad():
                inputs = self.workload.features(inputs)
        if self.order.padded is not None:
            length = self.order.padded[torch.searchsorted(self.order.padded, inputs.shape[-1])]
            inputs = pad(inputs, (0, int(length) - inputs.shape[-1]))
        return inputs, *rest

    def _quarantine(self, bad: dict[str, str]) -> None:
        self.bad.update(bad)
        if len(self.bad) > BAD_SHARE * self.order.count:
            path, why = next(iter(self.bad.items()))
            raise SpeedkitError(
                f"{len(self.bad)} of {self.order.count} files cannot be read, more than {BAD_SHARE:.0%} of them; "
                f"the first is {path}: {why}. Mend or remove them"
            )

    @property
    def pids(self) -> list[int]:
        """The loader's processes."""
        return [process.pid for process in self.loader.processes]

    def signal_workers(self, number: int) -> None:
        """Send a signal to every worker: SIGSTOP keeps them from working while another plan is timed."""
        self.loader.signal(number)

    def close(self) -> None:
        """End the loader's processes."""
        self.signal_workers(signal.SIGCONT)
        self.pass_ = None
        self.loader.close()
