"""What measuring changes of the whole process, and puts back."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from speedkit.machine import this_machine
from speedkit.train.process_state import process_state_kept


@contextlib.contextmanager
def process_kept(device: torch.device | str) -> Iterator[None]:
    """Leave what `process_state_kept` does as it is before the block, and the random states of Python and NumPy."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - somebody's data set may draw from it
    with process_state_kept(this_machine(device).device):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
