"""The text workload: a masked-diffusion language model over bytes, by default of Python's own standard library.

Nie et al. 2025, "Large Language Diffusion Models" (LLaDA): hide a random share of a window of text, and learn to fill
it in from both sides. A byte is a token, and a window is a slice of one tensor in memory.
"""

import functools
import math
import operator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedkit.errors import UsageError
from speedkit.lab.sources import find_text
from speedkit.lab.workloads.sizes import NetSize
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Workload

BYTES = 256
MASK = 256  # a hidden byte stands in the input as this number, and is never predicted
TEST_WINDOWS = 256  # at most so many windows are tested on
RATIOS = 64  # with so many shares of them hidden in turn
# What grows is the width between the two products of a block's second half. On a GPU widths are multiples of 128, as
# tensor cores like them, and a head has 64 or 128.
SIZES = {
    "tiny": NetSize(64, 2, 32, (3,), inputs=64),
    "small": NetSize(128, 4, 64, (3,), inputs=128),
    "medium": NetSize(1024, 10, 128, (2.75,), inputs=1024),  # 129 million weights
}
RECIPE = Recipe(batch_size=16, epochs=None, steps=240, learning_rate=3e-3, weight_decay=0.1, clip_norm=1.0)
RECIPES = {1024: replace(RECIPE, batch_size=64, steps=2000, learning_rate=6e-4)}  # of windows with their own


def text(
    data_dir: str | Path | None = None,
    *,
    test_pattern: str | None = None,
    size: NetSize = SIZES["small"],
    clips: int | None = None,
) -> Workload:
    """Return the workload on the text files under `data_dir`, or on the source of Python's standard library.

    `test_pattern` chooses the test files as in `find_text`; at most `clips` windows are trained on. The metric bounds
    the bits per byte of the test files. Raises UsageError for unusable data.
    """
    window = size.inputs
    train, test = (windows_of(side, window) for side in find_text(data_dir, test_pattern))
    if not len(train) or not len(test):
        counts = f"{len(train)} windows of {window} bytes to train on and {len(test)} to test on"
        raise UsageError(f"there are {counts}: give more text, or lower size")
    train = train[:clips]
    test = test[:: math.ceil(len(test) / TEST_WINDOWS)]
    rows = torch.cat((train, test))
    return Workload(
        "text",
        RECIPES.get(window, RECIPE),
        range(len(train)),
        range(len(train), len(train) + len(test)),
        load=functools.partial(torch.select, rows, 0),
        features=Tensor.contiguous,  # nothing to do
        target=operator.index,  # the number of a window, which decides what is hidden of it in a test
        model=functools.partial(TextNet, size),
        loss=loss,
        score=bits,
        augment=augment,
        metric="bits_per_byte",
        higher_is_better=False,
        cacheable=False,
        rows=rows,
        margin=0.1,  # two standard deviations between seeds, a tenth of what is learned beyond how often bytes stand
        parameters={"window": window},
    )


def windows_of(side: bytes, window: int) -> Tensor:
    """Return text cut into whole windows [N, T], without the rest."""
    count = len(side) // window
    return torch.tensor(bytearray(side[: count * window]), dtype=torch.uint8).view(count, window)


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Return a batch (windows with bytes hidden [B, T], windows [B, T]): of each a random number of bytes, 1 to T.

    The numbers are spread evenly over a batch, and each of them alone is uniform: the same mean loss with less noise
    (Kingma et al. 2021, "Variational Diffusion Models").
    """
    windows = batch.inputs
    count, window = windows.shape
    start = torch.rand((), generator=generator, device=windows.device)
    order = torch.rand((count, window), generator=generator, device=windows.device).argsort(dim=1)
    share = (start + torch.arange(count, device=windows.device) / count) % 1  # [B], below 1
    is_hidden = order <= (share * window).floor()[:, None]
    return Batch(windows.long().masked_fill(is_hidden, MASK), windows)


@functools.lru_cache(maxsize=4)
def evaluation_masks(window: int, device: torch.device) -> Tensor:
    """Return what is hidden when evaluating, [RATIOS, T]: the same for all devices, batch sizes and seeds."""
    order = torch.rand(RATIOS, window, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    counts = ((torch.arange(RATIOS) + 0.5) * window / RATIOS).ceil()
    return (order < counts[:, None]).to(device)


def loss(model: nn.Module, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return (mean over windows of the mean cross-entropy of their hidden bytes, the same in bits per window [B]).

    With a uniform number of hidden bytes that is on average an upper bound of the negative log-likelihood per byte (Nie
    et al. 2025, equations 3 and 6). A batch that did not go through `augment` has bytes hidden by a fixed rule.
    """
    shown = batch.inputs
    windows = batch.targets
    if windows.dim() == 1:  # (windows, their numbers)
        mask = evaluation_masks(shown.shape[1], shown.device)[windows % RATIOS]
        windows = shown
        shown = windows.long().masked_fill(mask, MASK)
    is_hidden = shown == MASK
    # Logits of 256 bytes take less memory than one activation of a block: there is nothing to gain from chunks of them.
    logits = model(shown).flatten(0, 1)
    byte_loss = F.cross_entropy(logits, windows.long().flatten(), reduction="none").view_as(is_hidden)
    nats = (byte_loss * is_hidden).sum(dim=1) / is_hidden.sum(dim=1)
    return nats.mean(), nats.detach() / math.log(2)


def bits(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the outputs of `loss`, which are bits already."""
    return outputs


class RMSNorm(nn.RMSNorm):
    """x / its root mean square, times a weight (Zhang and Sennrich 2019): in float32, whatever comes and goes."""

    def forward(self, x: Tensor) -> Tensor:  # [..., C] -> [..., C]
        return super().forward(x.float()).to(x.dtype)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Return x [B, T, ..., D] with pairs of its numbers turned by angles that grow along T (RoPE, Su et al. 2021).

    `turns` [2, T, D / 2] float32 holds their cosines and sines.
    """
    a, b = x.float().chunk(2, dim=-1)
    cosine, sine = turns[:, :, None, None]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention in both directions, then SwiGLU (Shazeer 2020), each beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = RMSNorm(width, eps=1e-6)
        self.norm_2 = RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        qkv = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1))  # [B, T, 3, H, D]
        query, key = rotate(qkv[:, :, :2], turns).transpose(1, 3).unbind(2)  # [B, H, T, D] each
        value = qkv[:, :, 2].transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)


class TextNet(nn.Module):
    """Windows with hidden bytes [B, T] -> logits of every byte [B, T, 256]."""

    turns: Tensor

    def __init__(self, size: NetSize):
        super().__init__()
        width, layers, head, (growth,), window = size
        self.embedding = nn.Embedding(BYTES + 1, width)
        self.blocks = nn.ModuleList(Block(width, width // head, round(growth * width)) for _ in range(layers))
        self.norm = RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, BYTES, bias=False)
        half = head // 2
        angles = torch.arange(window)[:, None] * 10_000.0 ** (-torch.arange(half) / half)  # [T, D / 2]
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                fan_in = weight.shape[1]
                if name.startswith("embedding"):
                    fan_in = 1
                if name.endswith(("mix.weight", "down.weight")):  # into the shortcut, where 2 per layer add up
                    fan_in *= 2 * layers
                deviation = fan_in**-0.5
                nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embedding(windows)  # [B, T, C]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # else the shortcuts would carry float32 through the net
        for block in self.blocks:
            x = block(x, self.turns[:, : windows.shape[1]])
        return self.head(self.norm(x))
