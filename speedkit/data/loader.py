"""Items to samples, samples to batches, batches to the device: live through a loader, or gathered from a cache."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from speedkit.data.augment import seed_step
from speedkit.data.batch import Batch, OwnBatch, map_batch, stacked
from speedkit.data.batches import BatchLoader, BatchMaker, item_name
from speedkit.data.cache_in_memory import CacheInMemory
from speedkit.data.cache_on_disk import FeatureCache
from speedkit.data.own_loader import LoaderItems, LoaderSource
from speedkit.data.prefetch import prefetched
from speedkit.data.sampler import BatchSampler
from speedkit.errors import SpeedkitError, check_bad_share
from speedkit.plan import Plan
from speedkit.workload import Workload

WAVEFORMS = 1 << 48  # added to the step that seeds changes of waveforms: those of features draw other numbers
TENSOR_CORES = 32  # frames, of which the lengths of a GPU's buckets are multiples
RANK = 1 << 40  # and this for each rank, whose samples are its own


def make_sample(
    index: int,
    *,
    items: Sequence[Any],
    load: Callable[[Any], Tensor],
    features: Callable[[Tensor], Tensor] | None,
    target: Callable[[Any], Any],
) -> tuple[Tensor, Any]:
    """Return (features, target) of an item, or (what was loaded, target) without `features`. Raises BadItem."""
    inputs = load(items[index])
    if features is not None:
        inputs = features(inputs)
    return inputs, target(items[index])


def collate(samples: Sequence[tuple[Tensor, Any]], varies: bool = False) -> Batch:
    """Return the batch of samples (inputs, target), where lengths vary padded with zeros to the longest."""
    inputs = []
    targets = []
    for loaded, target in samples:
        inputs.append(loaded)
        targets.append(target)
    lengths = None
    if varies:
        lengths = torch.tensor([row.shape[-1] for row in inputs])
        longest = int(lengths.max())
        inputs = [pad(row, (0, longest - row.shape[-1])) for row in inputs]
    # With a gradient's history a tensor could not leave a worker.
    return Batch(torch.stack(inputs).detach(), stacked(targets), lengths)


def live_loader(
    workload: Workload, items: Sequence[Any], plan: Plan, *, sampler: BatchSampler
) -> BatchLoader | LoaderSource:
    """Return what makes the batches of `sampler` from their items."""
    if isinstance(items, LoaderItems):
        return LoaderSource(items, sampler, plan)
    sample = functools.partial(
        make_sample,
        items=items,
        load=workload.load_by(plan.decoder),
        features=workload.features if plan.features_on == "cpu" else None,
        target=workload.target,
    )
    collated = functools.partial(collate, varies=workload.length is not None)
    return BatchLoader(BatchMaker(items, sample, collated), sampler, plan)


class BatchStream:
    """An endless stream of batches on the device, epoch after epoch, each tensor [B, ...].

    `epoch` and `position` say where the next batch comes from, and can be set. A `seed` of None keeps the items in
    order (evaluation). `bad` is path -> why of each file that could not be read; over 5 % are an error. Each of several
    ranks gets its share of every batch.
    """

    def __init__(
        self,
        workload: Workload,
        items: Sequence[Any],
        plan: Plan,
        *,
        batch_size: int,
        seed: int | None,
        device: torch.device,
        drop_last: bool = False,
        cache: FeatureCache | CacheInMemory | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.workload = workload
        self.plan = plan
        self.device = device
        self.cache = cache
        self.bad: dict[str, str] = {} if cache is None else cache.bad
        check_bad_share(self.bad, len(items))

        # Order. Clips of one length have nothing to bucket, and evaluation keeps the order of its items.
        self.lengths: Tensor | None = None
        if workload.length is not None:
            self.lengths = torch.tensor(list(map(workload.length, items)))
        self.sampler = BatchSampler(
            len(items),
            batch_size,
            seed,
            drop_last=drop_last,
            lengths=self.lengths if plan.bucket and seed is not None else None,
            of_frames=workload.of_frames,
            rank=rank,
            world_size=world_size,
            multiple=TENSOR_CORES if device.type == "cuda" else 1,
        )
        self.frames = 0  # padded frames of all batches so far, where lengths vary
        self.epoch = 0
        self.position = 0
        self.batches: Iterator[Batch] = iter(())  # of the epoch, up to where `next_place` is
        self.next_place: tuple[int, int] | None = None

        # Samples. What arrives on the device may be waveforms, whose features are computed there.
        if cache is None:
            self.waveforms = plan.features_on == "device"
        else:
            self.waveforms = plan.cache_of == "waveform"
        self.generator = torch.Generator(device=device)
        self.loader: Any = live_loader(workload, items, plan, sampler=self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; one of unreadable items alone is passed over."""
        while True:
            if (self.epoch, self.position) != self.next_place:  # a new epoch, or put elsewhere
                self.batches = self.one_epoch(self.epoch, self.position)
            batch = next(self.batches, None)
            if batch is not None:
                self.next_place = (self.epoch, self.position)
                return batch
            self.epoch += 1
            self.position = 0

    def one_epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on, without those of unreadable items alone."""
        self.epoch = self.sampler.epoch = epoch
        self.position = self.sampler.start = start
        source = self.loader
        if self.cache is not None:
            if self.cache.where == "disk":
                self.cache.check_size()  # type: ignore[union-attr]
            source = self.cached(self.sampler.batches())
        if self.plan.prefetch and self.device.type == "cuda":
            source = prefetched(source, self.to_device, self.device)
        else:
            source = map(self.to_device, source)
        for batch in source:
            self.position += 1
            if batch is not None:
                yield self.finish(batch, epoch * len(self) + self.position - 1)
            elif self.sampler.world_size > 1:
                raise SpeedkitError(f"rank {self.sampler.rank} can read nothing of its share, for which others wait")

    def batch_at(self, epoch: int, position: int) -> tuple[Batch | None, list[str]]:
        """Return the batch after which `epoch` and `position` were these, made again, and the names of its items."""
        sampler = dataclasses.replace(self.sampler, epoch=epoch, start=position - 1)
        if isinstance(self.loader, LoaderSource):
            loaded: Any = next(iter(LoaderSource(self.loader.items, sampler, self.plan)))
            numbers = range(len(loaded[0].inputs))
            return self.to_device(loaded), [f"sample {number}" for number in numbers]
        indices = sampler.batches()[0]
        if self.cache is None:
            loaded = self.loader.maker[indices.tolist()]
        else:
            [loaded] = self.cached([indices])
        batch = self.to_device(loaded)
        if batch is not None:
            batch = self.finish(batch, epoch * len(self) + position - 1)
        names = [item_name(self.loader.maker.items[index]) for index in indices.tolist()]
        return batch, [name for name in names if name not in self.bad]

    def cached(self, batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the usable indices [B] of each batch, on host and device: the epoch's order is sent once."""
        usable = self.cache.usable  # type: ignore[union-attr]
        if not usable.all():
            mask = torch.from_numpy(usable)
            batches = [indices[mask[indices]] for indices in batches]
        if self.device.type == "cpu":
            return list(zip(batches, batches, strict=True))
        order = torch.cat([torch.empty(0, dtype=torch.long), *batches])
        if self.device.type == "cuda":
            order = order.pin_memory()
        on_device = order.to(self.device, non_blocking=True)
        return list(zip(batches, on_device.split([len(indices) for indices in batches]), strict=True))

    def to_device(self, loaded: Any) -> Batch | None:
        """Return a batch on the device: made live, or of a cache, given by its indices [B] on host and device.

        None for a batch of unreadable items alone.
        """
        if self.cache is not None:
            indices, on_device = loaded
            if indices.size(0) == 0:  # `len` of a tensor is far slower
                return None
            return self.cache.gather(indices, self.device, on_device=on_device)
        batch, bad = loaded
        if bad:
            self.bad.update(bad)
            check_bad_share(self.bad, len(self.loader.maker.items))
        if batch is None:
            return None
        return map_batch(batch, functools.partial(Tensor.to, device=self.device, non_blocking=self.plan.pin_memory))

    def finish(self, batch: Batch, step: int) -> Batch:
        """Return what the loss takes: features, padded to one of few lengths where clips are bucketed."""
        if isinstance(batch, OwnBatch):
            return batch
        inputs = batch.inputs
        if self.waveforms:
            if self.workload.augment_waveform is not None and self.sampler.seed is not None:
                seed_step(self.generator, self.sampler.seed, step + WAVEFORMS + RANK * self.sampler.rank)
                inputs = self.workload.augment_waveform(inputs, self.generator)
            with torch.no_grad():
                inputs = self.workload.features(inputs)
        if self.lengths is not None:
            padded = self.sampler.padded_to(inputs.shape[-1])  # by its shape: no length is read from the device
            self.frames += len(inputs) * padded
            if padded > inputs.shape[-1]:
                inputs = pad(inputs, (0, padded - inputs.shape[-1]))
        return batch if inputs is batch.inputs else dataclasses.replace(batch, inputs=inputs)

    def close(self) -> None:
        """End the workers, paused ones too."""
        self.loader.close()
        self.batches = iter(())
        self.next_place = None
