"""Freed memory is kept for the next tensor."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, resource, torch
from speedkit.train.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        activations = [torch.ones(2_000_000) for _ in range(12)]  # 8 MB each, as a step makes and frees them
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# glibc starts with this threshold and may raise it by itself, or not, by what happens to lie at the end of the heap.
ctypes.CDLL(None).mallopt(-3, 128 << 10)
faults()
first = faults()
assert keep_freed_memory() and keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_tensors_take_no_page_faults_once_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 1000 and after < before / 10
