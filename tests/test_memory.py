"""What takes memory: activations counted and recomputed, the allocator, snapshots; freed memory kept."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from speedkit.plan import Plan
from speedkit.train import memory
from speedkit.train.compile import apply_compile
from speedkit.workloads.audio import AudioNet
from speedkit.workloads.image import ImageNet
from speedkit.workloads.speech import SpeechNet
from speedkit.workloads.text import TextNet

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="it is about a GPU's memory")

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
keep_freed_memory()
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
    loss_bytes = 4 if device == "cpu" else 512  # what CUDA's allocator rounds up to
    hidden_bytes = 4 * 32 * 256  # ReLU's result, which the second layer multiplies its gradient with: counted once
    assert memory.activation_bytes(lambda: model(inputs).sum(), torch.device(device)) == hidden_bytes + loss_bytes
    with torch.no_grad():
        assert memory.activation_bytes(lambda: model(inputs).sum(), torch.device(device)) == loss_bytes


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_of_a_function_is_what_it_holds_at_once(device):
    before = torch.ones(1 << 20, device=device)  # not counted

    def function():
        first = torch.empty(1 << 20, device=device)
        second = before + first
        del first
        third = torch.empty(1 << 18, device=device)
        return second, third

    assert memory.peak_bytes(function, torch.device(device)) == 8 << 20  # the first two; then the last two


class Block(nn.Module):
    """Attention and two layers beside shortcuts, with dropout, normalised per position."""

    def __init__(self, width, last=nn.Identity, dropout=0.2):
        super().__init__()
        self.attention = nn.Linear(width, 3 * width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), last())
        self.drop = nn.Dropout(dropout)

    def forward(self, x):  # [B, T, width]
        query, key, value = self.attention(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, 2, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        x = x + self.drop(mixed.transpose(1, 2).flatten(2))
        return x + self.drop(self.layers(x))


def make_net(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(16, **options), Block(16, **options), nn.Linear(16, 2))


FRAMES = torch.tensor([32, 24, 16, 32])
NETS = {  # and their inputs
    "attention": lambda: (make_net(), torch.randn(8, 12, 8)),
    "audio": lambda: (AudioNet(4, "tiny"), torch.randn(4, 1, 64, 48)),
    "image": lambda: (ImageNet(4, "tiny"), torch.rand(4, 3, 48, 48)),
    "speech": lambda: (SpeechNet("tiny"), torch.randn(4, 80, 32), FRAMES, torch.rand(4, 8) < 0.5),
    "text": lambda: (TextNet("tiny"), torch.randint(256, (4, 64))),
}


def gradients(model, *inputs, amp=False):
    """Gradients of two micro-batches together, and the random state after them."""
    torch.manual_seed(1)
    model.zero_grad()
    for part in zip(*(tensor.chunk(2) for tensor in inputs), strict=True):
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=amp):
            outputs = model(*part)
        (outputs[0] if isinstance(outputs, tuple) else outputs).float().square().mean().backward()
    return [*(weight.grad for weight in model.parameters() if weight.grad is not None), torch.get_rng_state()]


def checkpointed(model, mode):
    model = copy.deepcopy(model)
    assert memory.checkpoint_blocks(model, Plan(checkpointing=mode)) == ""
    return model


def same(some, others):
    exact = {"rtol": 0, "atol": 0} if some[0].device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-6}
    return all(torch.allclose(*both, **exact) for both in zip(some, others, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["blocks", "selective"])
@pytest.mark.parametrize("net", NETS)
def test_recomputed_gradients_are_the_same_bits(net, mode, amp, device):
    plain, *inputs = (part.to(device) for part in NETS[net]())
    expected = gradients(plain, *inputs, amp=amp)
    model = checkpointed(plain, mode)
    assert same(gradients(model, *inputs, amp=amp), expected)
    assert same(gradients(copy.deepcopy(model), *inputs, amp=amp), expected), "a copy trains its own weights"
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert all(map(torch.equal, model.eval()(*inputs), plain.eval()(*inputs)))


def kept_bytes(model, device):
    inputs = torch.ones(8, 12, 8, device=device)
    return memory.activation_bytes(lambda: model(inputs).sum(), torch.device(device))


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
@pytest.mark.parametrize(("scope", "mode"), [("model", "selective"), ("blocks", "blocks")])
def test_compiled_blocks_are_recomputed_too(scope, mode):
    plain, inputs, kept = make_net(dropout=0.0), torch.randn(8, 12, 8), {}  # compiled code draws other masks
    expected = gradients(plain, inputs)[:-1]
    for checkpointing in ("off", mode):
        torch._dynamo.reset()
        model = checkpointed(plain, checkpointing)
        apply_compile(model, Plan(compile="default", compile_scope=scope))
        assert all(
            torch.allclose(*both, atol=1e-6) for both in zip(gradients(model, inputs)[:-1], expected, strict=True)
        )
        kept[checkpointing] = kept_bytes(model, CPU)
    assert kept[mode] < kept["off"]


@needs_gpu
def test_a_snapshot_of_a_gpu_is_written(tmp_path):
    memory.save_snapshot(tmp_path, torch.device("cuda"))
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes())["segments"]


EXPANDABLE = """
import torch
from speedkit.plan import Plan
from speedkit.train import memory

device = torch.device("cuda")
torch.empty(1, device=device)  # CUDA is in use before a plan is known
memory.set_allocator(Plan(allocator="expandable"), device)
more = torch.empty(1 << 30, dtype=torch.uint8, device=device)
print(any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""


@needs_gpu
def test_the_allocator_took_what_it_was_told():
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
