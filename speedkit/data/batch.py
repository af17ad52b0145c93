"""What a step learns from: the tensors of some samples."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, register_pytree_node, tree_leaves, tree_map_only

from speedkit.errors import UsageError


@dataclasses.dataclass(eq=False)  # not frozen: Lightning moves the tensors of a copy by assignment
class Batch:
    """The tensors of a batch. The first dimension of each counts the samples."""

    inputs: Tensor  # [B, ...], or where lengths differ [B, ..., T_max], padded with zeros
    targets: Tensor  # [B, ...]
    lengths: Tensor | None = None  # [B] of the last dimension, where they differ
    extra: tuple[Tensor, ...] = ()  # what augmentation adds, such as the targets that mixup mixes in

    def pin_memory(self) -> "Batch":
        """Return it in page-locked memory: DataLoader calls this, and would pin nothing without."""
        return map_batch(self, Tensor.pin_memory)


register_dataclass(Batch)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnBatch:
    """A batch as its author's loader made it: any nesting of tensors in tuples, lists, dicts and other mappings."""

    value: Any
    inputs: Tensor  # one of its tensors, whose first dimension counts the samples
    splits: bool  # whether parts of it are batches too: all tensors count the samples first, and nothing else could


def own_batch(value: Any) -> OwnBatch:
    """Return the batch of what torch's pytree can take apart, and of mappings; raise UsageError without a tensor."""
    leaves = tree_leaves(value)
    mappings = {type(leaf) for leaf in leaves if isinstance(leaf, Mapping)}  # such as what a tokenizer returns
    if mappings:
        for kind in mappings:
            register_pytree_node(kind, take_apart, partial(put_together, kind))
        return own_batch(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    counting = [tensor for tensor in tensors if tensor.ndim]
    if not counting:
        what = f"a batch ({type(value).__name__}) holds no tensor [B, ...]"
        raise UsageError(f"{what}: the loader has to give tensors, in tuples, lists or dicts")
    countable = all(isinstance(leaf, Tensor | int | float | None) for leaf in leaves)
    counts = {tensor.shape[:1] for tensor in tensors}
    return OwnBatch(value, counting[0], splits=countable and len(counts) == 1)


def take_apart(mapping: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Return the values and keys of a mapping."""
    return list(mapping.values()), list(mapping)


def put_together(kind: Callable[[dict[Any, Any]], Any], values: Iterable[Any], keys: Iterable[Any]) -> Any:
    """Return the mapping that `take_apart` took apart."""
    return kind(dict(zip(keys, values, strict=True)))


def stacked(targets: Sequence[Any]) -> Tensor:
    """Return the targets of samples, tensors or numbers, as one tensor [N, ...]."""
    if isinstance(targets[0], Tensor):
        return torch.stack(tuple(targets))
    return torch.tensor(targets)


def map_batch(batch: Batch | OwnBatch, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` with `function` of each of its tensors."""
    if isinstance(batch, OwnBatch):
        return own_batch(tree_map_only(Tensor, function, batch.value))
    return tree_map_only(Tensor, function, batch)


def tensors_of(batch: Batch | OwnBatch | None) -> list[Tensor]:
    """Return all tensors of a batch; none of None."""
    value = batch.value if isinstance(batch, OwnBatch) else batch
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
