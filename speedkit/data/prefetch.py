"""Copy the next batch to the GPU on a stream of its own while this one computes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from speedkit.data.batch import Batch, tensors_of


def prefetched(
    source: Iterable[Any], copy: Callable[[Any], Batch | None], device: torch.device
) -> Iterator[Batch | None]:
    """Yield `copy(item)` for each item of `source`, one ahead of the consumer: CUDA only.

    A batch is allocated on the copying stream, and the consumer's waits for the event after its copy. Pinned memory
    that is copied from may be let go at once: PyTorch gives it to nobody before the copy has been made.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still be filling what is copied from
    ahead: tuple[Batch | None, torch.cuda.Event] | None = None
    try:
        for item in source:
            with torch.cuda.stream(stream):
                copied = copy(item), stream.record_event()
            if ahead is not None:
                yield received(*ahead, device)
            ahead = copied
        if ahead is not None:
            yield received(*ahead, device)
    finally:
        # Indices that lie on the device may be given back now, and a copy may still read them.
        torch.cuda.current_stream(device).wait_stream(stream)


def received(batch: Batch | None, done: torch.cuda.Event, device: torch.device) -> Batch | None:
    """Return the batch, made safe to use on the current stream."""
    consumer = torch.cuda.current_stream(device)
    consumer.wait_event(done)
    for tensor in tensors_of(batch):
        tensor.record_stream(consumer)  # its memory goes to no later copy before it has been read
    return batch
