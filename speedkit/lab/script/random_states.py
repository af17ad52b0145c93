"""The states of all random numbers that a script may draw."""

import random
from typing import Any

import numpy as np
import torch

RandomStates = tuple[Any, ...]


def random_states() -> RandomStates:
    """Return the states of all random numbers that a script may draw."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), gpus, random.getstate(), np.random.get_state()  # noqa: NPY002 - scripts draw from it


def restore_random(states: RandomStates) -> None:
    """Put random states back."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
    random.setstate(states[2])
    np.random.set_state(states[3])  # noqa: NPY002
