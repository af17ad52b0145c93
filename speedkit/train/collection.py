"""Python's garbage collector, kept out of the steps."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Let no garbage collection begin by itself in what runs inside; call `gc.collect()` where a pause does no harm.

    Left alone it begins after some number of allocations, in the middle of some step, looks through every object of
    the process, and keeps a GPU waiting. What exists on entering is not looked through again: a collection inside
    takes milliseconds. Tensors are freed as ever, by their reference counts.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
