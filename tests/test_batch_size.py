"""The automatic batch size: every kind of out-of-memory is known, what is chosen fits, and nothing else is changed."""

import pytest
import torch
from faults import OUT_OF_MEMORY, chained, strike

from speedkit.train.oom import is_out_of_memory


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_every_kind_of_out_of_memory_is_known(kind):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        strike(kind)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),  # no library reports it so
    chained(RuntimeError("the loss failed"), ValueError("no such class")),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    KeyboardInterrupt(),
], ids=repr)  # fmt: skip
def test_no_other_error_passes_for_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_chain_that_bites_its_tail_ends():
    first, second = RuntimeError("one"), RuntimeError("other")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
