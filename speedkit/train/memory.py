"""How the C library hands out memory on a CPU."""

import ctypes
import functools
import sys

# mallopt's parameters, from glibc's malloc.h; 32 MB is the largest threshold that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 1 << 30, M_TOP_PAD: 64 << 20}


@functools.lru_cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next tensor instead of returning it to the system; return whether it does.

    By default the activations that a step frees go back, and each step takes thousands of page faults to get them
    again; their cost varies several times over on a virtual machine and drowns what is to be measured. It speeds up
    every plan, the naive one too, so it is no part of a plan: set for the whole process, once (man 3 mallopt).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in KEPT.items())
