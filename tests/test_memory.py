"""What takes memory: activations are counted; freed memory is kept for the next tensor."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from speedkit.train import memory

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

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


@pytest.mark.parametrize("device", DEVICES)
def test_activation_bytes_are_those_that_the_backward_pass_needs(device):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    inputs = torch.randn(32, 64, device=device)
    loss_bytes = 4
    hidden_bytes = 4 * 32 * 256  # ReLU's result, which the second layer multiplies its gradient with: counted once
    assert memory.activation_bytes(lambda: model(inputs).sum()) == hidden_bytes + loss_bytes
    with torch.no_grad():
        assert memory.activation_bytes(lambda: model(inputs).sum()) == loss_bytes
    with torch.autocast(device, torch.bfloat16):
        halved = memory.activation_bytes(lambda: model(inputs).sum())
    copies = 2 * (32 * 64 + 256 * 8 + 64 * 256)  # autocast keeps its bfloat16 input and weights
    assert hidden_bytes // 2 <= halved <= hidden_bytes // 2 + copies + loss_bytes
