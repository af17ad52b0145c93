"""A plain training loop, and ten causes of slowness that can be injected into it, one at a time, at a known cost."""

import contextlib
import io
import itertools
import statistics
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from speedkit.clock import timed
from speedkit.hardware import this_machine

# The causes by the names that the diagnosis has for them, and the field of the plan that cures each.
CAUSES = {
    "slow decode": "workers",
    "slow collate": "workers",
    "large copies": "pin_memory",
    "host read each step": "log_every",
    "printing each step": "log_every",
    "many small operators": "compile",
    "compute-bound": "precision",
    "bandwidth-bound": "compile",
    "new shapes": "bucket",
    "validation too often": "validate_every",
}
GPU_ONLY = {"large copies", "host read each step"}  # a CPU copies nothing, and has computed a loss before it is read
SIZES = {"cpu": (2, 512, 128), "cuda": (32, 256, 2048)}  # sequences per batch, tokens in each, width of the model


def causes_on(device):
    """Return the causes that this machine can have."""
    impossible = GPU_ONLY if device == "cpu" else set()
    if not this_machine(device).supports("bf16"):
        impossible = impossible | {"compute-bound"}
    return [cause for cause in CAUSES if cause not in impossible]


def busy(seconds):
    """Keep a processor core busy for so long: unlike sleeping, which would let others use it."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


class Pool(nn.Module):
    """The mean over time, [B, T, C] -> [B, C], after `extra` work on the input that nothing depends on."""

    extra = staticmethod(lambda hidden: None)

    def forward(self, hidden):
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            self.extra(hidden)
        return hidden.mean(dim=1)


class Loop(Dataset):
    """A small net that learns from short sequences of tokens, in bf16 where it is fast, with a fused optimizer."""

    def __init__(self, device="cpu"):
        torch.manual_seed(0)
        self.device, (self.batch_size, self.length, self.width) = device, SIZES[device]
        self.tokens = torch.randint(256, (64, 16 * self.length))
        self.lengths = itertools.repeat(self.length)
        self.beside = torch.zeros(1)  # goes to the device with each batch
        blocks = []
        for _ in range(2):
            blocks += [nn.Linear(self.width, 4 * self.width), nn.GELU(), nn.Linear(4 * self.width, self.width)]
        self.model = nn.Sequential(nn.Embedding(256, self.width), *blocks, Pool(), nn.Linear(self.width, 10)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.loader = DataLoader(self, self.batch_size, collate_fn=self.collate, pin_memory=device == "cuda")
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=this_machine(device).supports("bf16"))
        self.settings = contextlib.nullcontext()
        self.decode = self.before_collate = lambda: None
        self.after_step = lambda loss: None

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        self.decode()
        return self.tokens[index % 64], index % 10

    def collate(self, samples):
        self.before_collate()
        tokens, labels = default_collate(samples)
        return tokens[:, : next(self.lengths)], labels, self.beside

    def train(self, steps):
        self.model.train()
        for batch in itertools.islice(self.loader, steps):
            tokens, labels, _ = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            self.optimizer.zero_grad(set_to_none=True)
            with self.settings, self.autocast:
                loss = nn.functional.cross_entropy(self.model(tokens), labels)
            loss.backward()
            self.optimizer.step()
            self.after_step(loss)


def inject_slowdown(loop, cause, seconds):
    """Change the loop so that each step takes about `seconds` longer because of `cause`; what it learns stays."""
    terminal = io.StringIO()
    terminal.flush = lambda: busy(seconds)
    if cause == "slow decode":
        loop.decode = lambda: busy(seconds / loop.batch_size)
    elif cause == "slow collate":
        loop.before_collate = terminal.flush
    elif cause == "host read each step":
        loop.after_step = lambda loss: busy(seconds + 0 * loss.item())
    elif cause == "printing each step":
        loop.after_step = lambda loss: print(f"{loss.item():.4f}", file=terminal, flush=True)
    elif cause == "large copies":
        one = torch.ones(2**22)
        loop.loader.pin_memory = False
        loop.beside = torch.ones(repeats(lambda: one.to(loop.device), seconds, loop.device) * 2**22)
    elif cause == "new shapes":
        recompile_each_step(loop, seconds)
    elif cause == "validation too often":
        loop.after_step = repeated(lambda: evaluate(loop), seconds, loop.device)
    else:
        loop.model[-2].extra = repeated(work_of(cause, loop), seconds, loop.device)


def work_of(cause, loop):
    """Return a small piece of the operators' work that makes up a cause."""
    if cause == "many small operators":
        one = torch.ones(1, device=loop.device)
        return lambda: [one.mul_(1.0) for _ in range(1000)]
    if cause == "bandwidth-bound":
        large = torch.ones(2 ** (28 if loop.device == "cuda" else 24), device=loop.device)  # no cache holds it
        return lambda: large.mul_(1.0)
    hidden = torch.randn(loop.batch_size, loop.length, loop.width, device=loop.device)
    weights = torch.randn(loop.width, loop.width, device=loop.device)
    return lambda: hidden @ weights


def evaluate(loop):
    loop.model.eval()
    with torch.no_grad(), loop.autocast:
        loop.model(loop.tokens[: loop.batch_size, : loop.length].to(loop.device))
    loop.model.train()


def repeated(work, seconds, device):
    """Return a function that does the work as often as fits into `seconds`."""
    count = repeats(work, seconds, device)
    return lambda *_: [work() for _ in range(count)]


def repeats(work, seconds, device):
    """Return how many times the work fits into `seconds`."""
    return max(1, round(seconds / statistics.median(timed(work, device, 9, warmup=2))))


def recompile_each_step(loop, seconds):
    """Give each batch a length of its own, for which a compiler that takes `seconds` compiles the pooling anew."""

    def compiler(graph, inputs):
        busy(seconds)
        return graph.forward

    loop.model[-2].forward = torch.compile(Pool().forward, backend=compiler, dynamic=False)
    loop.lengths = itertools.count(loop.length)
    # By default it would give up after eight, and go on without compiling.
    loop.settings = torch._dynamo.config.patch(recompile_limit=10**4, accumulated_recompile_limit=10**4)
