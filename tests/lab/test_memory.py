"""What takes memory: activations counted and recomputed, and how memory is handed out."""

import copy
import subprocess
import sys

import pytest
import torch
from tiny import DEVICES
from torch import nn

from speedkit.lessons.step_memory import activation_bytes
from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.train import memory
from speedkit.train.compile import apply_compile

CODE = """
import ctypes, resource, torch
from speedkit.plan import Plan
from speedkit.train.memory import set_allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        activations = [torch.ones(2_000_000) for _ in range(12)]  # 8 MB each, as a step makes and frees them
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# glibc starts with this threshold and may raise it by itself, or not, by what happens to lie at the end of the heap.
ctypes.CDLL(None).mallopt(-3, 128 << 10)
before = faults()
set_allocator(Plan(allocator="keep"), torch.device("cpu"))
faults()
assert before > 1000 and faults() < before / 10
"""


@pytest.mark.slow
@pytest.mark.skipif(not this_machine("cpu").supports("mallopt"), reason="mallopt is glibc's")
def test_tensors_take_no_page_faults_once_freed_memory_is_kept():
    subprocess.run([sys.executable, "-c", CODE], check=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_those_kept_for_the_backward_pass_and_the_most_held_at_once(device):
    model, inputs = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device), torch.randn(32, 64)
    inputs, device = inputs.to(device), torch.device(device)
    loss_bytes = 4 if device.type == "cpu" else 512  # what CUDA's allocator rounds up to
    hidden_bytes = 4 * 32 * 256  # ReLU's result, which the second layer multiplies its gradient with: counted once
    assert activation_bytes(lambda: model(inputs).sum(), device) == hidden_bytes + loss_bytes
    with torch.no_grad():
        assert activation_bytes(lambda: model(inputs).sum(), device) == loss_bytes
    before = torch.ones(1 << 20, device=device)  # not counted

    def function():
        first = torch.empty(1 << 20, device=device)
        second = before + first
        del first
        return second, torch.empty(1 << 18, device=device)

    assert memory.peak_bytes(function, device) == 8 << 20  # the first two; then the last two


class Block(nn.Module):
    """Two layers beside a shortcut, with dropout, normalised per position."""

    def __init__(self, width, last=nn.Identity, dropout=0.2):
        super().__init__()
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), last()
        self.layers = nn.Sequential(*layers, nn.Dropout(dropout))

    def forward(self, x):  # [B, T, width]
        return x + self.layers(x)


def make_net(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(16, **options), Block(16, **options), nn.Linear(16, 2))


def gradients(model, inputs):
    """Gradients of two micro-batches together, and the random state after them."""
    torch.manual_seed(1)
    model.zero_grad()
    for part in inputs.chunk(2):
        model(part).square().mean().backward()
    return [*(weight.grad for weight in model.parameters()), torch.get_rng_state()]


def checkpointed(model, mode):
    model = copy.deepcopy(model)
    assert memory.checkpoint_blocks(model, Plan(checkpointing=mode)) == ""
    return model


def same(some, others):
    exact = {"rtol": 0, "atol": 0} if some[0].device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-6}
    return all(torch.allclose(*both, **exact) for both in zip(some, others, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["blocks", "selective"])
def test_recomputed_gradients_are_the_same_bits(mode, device):
    plain, inputs = make_net().to(device), torch.randn(8, 12, 8, device=device)
    expected = gradients(plain, inputs)
    model = checkpointed(plain, mode)
    assert same(gradients(model, inputs), expected)
    assert same(gradients(copy.deepcopy(model), inputs), expected), "a copy trains its own weights"
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), plain.eval()(inputs))


def kept_bytes(model, device):
    inputs = torch.ones(8, 12, 8, device=device)
    return activation_bytes(lambda: model(inputs).sum(), torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_less_is_kept_in_training_and_as_much_as_ever_in_evaluation(device):
    off, selective, blocks = (checkpointed(make_net(), mode).to(device) for mode in ("off", "selective", "blocks"))
    assert kept_bytes(blocks, device) < kept_bytes(selective, device) < kept_bytes(off, device)
    assert len({kept_bytes(model.eval(), device) for model in (off, selective, blocks)}) == 1


def test_blocks_that_cannot_run_twice_are_left_alone_with_the_reason():
    normalised, without = make_net(last=lambda: nn.BatchNorm1d(16)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = Plan(checkpointing="blocks")
    assert "running statistics of a block's BatchNorm1d" in memory.checkpoint_blocks(normalised, plan)
    assert "no repeated blocks" in memory.checkpoint_blocks(without, plan)
    assert not any("forward" in vars(module) for module in normalised.modules())


@pytest.mark.slow
def test_compiled_blocks_are_recomputed_too():
    plain, inputs, kept = make_net(dropout=0.0), torch.randn(8, 12, 8), []  # compiled code draws other masks
    expected = gradients(plain, inputs)[:-1]
    for mode in ("off", "selective"):
        torch._dynamo.reset()
        model = checkpointed(plain, mode)
        apply_compile(model, Plan(compile="default"))
        torch.testing.assert_close(gradients(model, inputs)[:-1], expected, atol=1e-6, rtol=1e-5)
        kept.append(kept_bytes(model, "cpu"))
    assert kept[1] < kept[0]


EXPANDABLE = """
import torch
from speedkit.plan import Plan
from speedkit.train import memory

device = torch.device("cuda")
torch.empty(1, device=device)  # CUDA is in use before a plan is known
memory.set_allocator(Plan(allocator="expandable"), device)
more = torch.empty(1 << 30, dtype=torch.uint8, device=device)
assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it is about a GPU's memory")
def test_the_allocator_took_what_it_was_told():
    subprocess.run([sys.executable, "-c", EXPANDABLE], check=True)


def test_what_onednn_says_without_memory_is_out_of_memory():
    assert memory.is_out_of_memory(RuntimeError("could not create a primitive"))
