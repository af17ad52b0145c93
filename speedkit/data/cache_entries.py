"""How an entry of a feature cache is computed, and in which number format it is kept."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data.batches import item_name
from speedkit.errors import BadItem, TooManyBad
from speedkit.plan import Plan
from speedkit.workload import Workload


@dataclasses.dataclass
class EntryMaker:
    """Computes entries: `maker(item)` are the values of an item in the number format of the cache."""

    load: Callable[[Any], Tensor]
    features: Callable[[Tensor], Tensor] | None  # None where waveforms are kept
    dtype: np.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number format as PyTorch calls it."""
        return getattr(torch, self.dtype.name)

    def __call__(self, item: Any) -> np.ndarray:
        """Return the values of an item. Raises BadItem."""
        exact = self.load(item)
        if self.features is not None:
            exact = self.features(exact)
        if self.dtype == np.int16:
            exact = (exact * 32768).round().clamp(-32768, 32767)
        values = exact.to(self.torch_dtype)
        if not (exact.isfinite().all() and values.isfinite().all()):
            raise BadItem(item_name(item), f"its features hold NaN, infinity or numbers beyond {self.dtype}")
        return values.contiguous().numpy(force=True)

    def first_shape(self, items: Sequence[Any]) -> tuple[int, ...]:
        """Return the shape of the first entry that can be computed. Raises TooManyBad where there is none."""
        bad = {}
        for item in items:
            try:
                return self(item).shape
            except BadItem as error:
                bad[error.path] = error.why
        raise TooManyBad(bad, len(items))


def entry_maker(workload: Workload, plan: Plan) -> EntryMaker:
    """Return what computes the entries of `workload` that `plan` keeps."""
    load = workload.load_by(plan.decoder)
    if plan.cache_of == "waveform":
        return EntryMaker(load, None, np.dtype(workload.kept_as))
    return EntryMaker(load, workload.features, np.dtype(plan.cache_dtype))
