"""How the C library hands out memory on a CPU."""

import ctypes
import functools

# mallopt's parameters, from glibc's malloc.h; 32 MB is the largest threshold that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 1 << 30, M_TOP_PAD: 64 << 20}


@functools.lru_cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next tensor instead of returning it to the system; return whether it does.

    By default each step takes thousands of page faults to get its activations' memory again; their cost varies several
    times over on a virtual machine and drowns what is to be measured. It speeds up every plan, the naive one too, so it
    is no part of a plan (man 3 mallopt).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all(mallopt(parameter, value) == 1 for parameter, value in KEPT.items())
