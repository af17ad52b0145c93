"""Copy the next batch to the GPU on a stream of its own while this one computes."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Tensor, ...] | None


def prefetched(source: Iterator[Any], copy: Callable[[Any], Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `copy(item)` for each item of `source`, one ahead of the consumer: CUDA only.

    Who owns what: a batch is allocated on the copying stream, and the consumer's stream waits for the event after its
    copy; `record_stream` then keeps the allocator from giving its memory to a later copy before the consumer's stream
    has read it. An item (page-locked memory) is held until its own copy has been made.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be filling what is copied from
    held: list[tuple[torch.cuda.Event, Any]] = []

    def copied() -> Iterator[tuple[Batch, torch.cuda.Event]]:
        for item in source:
            with torch.cuda.stream(stream):
                batch, done = copy(item), stream.record_event()
            held[:] = [(event, kept) for event, kept in held if not event.query()] + [(done, item)]
            yield batch, done

    end: Any = None
    for (batch, done), _ in itertools.pairwise(itertools.chain(copied(), [end])):
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(done)
        for tensor in batch or ():
            tensor.record_stream(consumer)
        yield batch
