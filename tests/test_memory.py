"""Freed memory is kept for the next tensor."""

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from speedkit.train.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2_000_000)  # 8 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

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
    assert before > 20 * 1000 and after < 100  # 8 MB are 1953 pages of 4 kB, fewer where pages are large
