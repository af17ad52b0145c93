"""The speech workload: a Conformer guesses masked frames of utterances whose lengths differ widely.

It guesses codes of a random quantiser that is never trained: BEST-RQ (Chiu et al. 2022,
https://arxiv.org/abs/2202.01855). The net is torchaudio's Conformer behind a convolutional stem that makes one frame of
four, as FastConformer and NEST have it. No result depends on the padding of a clip, or on the others in its batch.
"""

import dataclasses
import functools
import math
import operator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torchaudio.models.conformer import ConformerLayer

from speedkit.errors import UsageError
from speedkit.lab import decode
from speedkit.lab.sources import Item
from speedkit.lab.workloads.audio import framing, log_mel
from speedkit.lab.workloads.generated import find_or_generate
from speedkit.lab.workloads.sizes import NetSize
from speedkit.lab.workloads.sounds import utterances
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Workload

BANDS = 80
STRIDE = 4  # spectrogram frames of 10 ms in one frame of the net
BLOCK = 10  # of every 10 frames of the net 4 in a row are masked
SPAN = 4
CODES = 256
CODE_SIZE = 16
KERNEL = 9  # frames that the depthwise convolution sees, as in FastConformer
SIZES = {"tiny": NetSize(64, 2, 32), "small": NetSize(128, 4, 32), "medium": NetSize(512, 17, 64)}
RECIPE = Recipe(batch_size=16, epochs=8, learning_rate=2e-3, weight_decay=0.01, clip_norm=1.0)


def speech(
    data_dir: str | Path | None = None, *, size: NetSize = SIZES["small"], max_duration_s: float = 30.0, **options: Any
) -> Workload:
    """Return the workload on all recordings under `data_dir`, or on generated utterances without one.

    Labels are not needed. Clips over `max_duration_s` are left out, and listed with the files that cannot be read;
    those under 0.4 s are padded with silence. `options` are those of `find_items`, and `clips`. Raises UsageError for
    unusable data.
    """
    files = find_or_generate(data_dir, utterances, labelled=False, **options)
    sides = (files.train, files.test, files.validation)
    train, test, validation = ([item for item in side if item.duration_s <= max_duration_s] for side in sides)
    if not train or not test:
        raise UsageError(f"too few clips last up to {max_duration_s:g} s: one to train and one to test on are needed")
    everything = (*files.train, *files.test, *files.validation)
    why = f"it lasts over {max_duration_s:g} s (max_duration_s)"
    too_long = {str(item.path): why for item in everything if item.duration_s > max_duration_s}
    spectrogram = framing(train)
    timing = {"sample_rate_hz": spectrogram["sample_rate_hz"], "hop": spectrogram["hop"]}
    return Workload(
        "speech",
        RECIPE,
        train,
        test,
        load=functools.partial(load, **timing),
        features=functools.partial(features, **spectrogram),
        target=operator.attrgetter("label"),
        model=functools.partial(SpeechNet, size),
        loss=loss,
        score=share_right,
        metric="masked-frame accuracy",
        augment=augment,
        length=functools.partial(frames, **timing),
        decoders=("torchcodec",),
        count=masked_frames,
        parameters=spectrogram,
        sources=(decode.load_audio, log_mel),
        quarantined=files.quarantined | too_long,
        validation=validation,
    )


def frames(item: Item, sample_rate_hz: int, hop: int) -> int:
    """Return the length of an item's spectrogram, from its header: whole frames of the net, one block at least."""
    samples = round(item.duration_s * sample_rate_hz)
    return STRIDE * max(BLOCK, samples // (STRIDE * hop))


def load(item: Item, sample_rate_hz: int, hop: int, *, decoder: str = "soundfile") -> Tensor:
    """Return the item's waveform [T] float32, `frames` times `hop` samples."""
    num_samples = hop * frames(item, sample_rate_hz, hop)
    return decode.load_audio(item.path, sample_rate_hz, num_samples, decoder=decoder)


def features(waveform: Tensor, **spectrogram: int) -> Tensor:
    """Return the log-mel spectrogram [..., M, F] of waveforms [..., T], each band of mean 0 and variance about 1.

    A band's mean and deviation are the speaker's and the microphone's, and would leave the quantiser a few codes only.
    """
    spectrum = log_mel(waveform, **spectrogram, bands=BANDS)[..., 0, :, :]
    spectrum = spectrum - spectrum.mean(dim=-1, keepdim=True)
    deviation = spectrum.square().mean(dim=-1, keepdim=True).sqrt()
    return spectrum / (deviation + 0.01)


def augment(batch: Batch, generator: torch.Generator) -> Batch:
    """Return the batch with a mask [B, N] of what to guess, drawn anew."""
    return dataclasses.replace(batch, extra=(draw_mask(batch, generator),))


def masked(batch: Batch) -> Tensor:
    """Return which frames of the net are to be guessed, [B, N]: at evaluation always the same."""
    if batch.extra:
        return batch.extra[0]
    return draw_mask(batch)


def masked_frames(batch: Batch) -> Tensor:
    """Return how many frames of a batch are to be guessed, on the device."""
    return masked(batch).sum()


def share_right(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the outputs of `loss`, which are the scores of the clips already."""
    return outputs


def draw_mask(batch: Batch, generator: torch.Generator | None = None) -> Tensor:
    """Return a mask [B, N] of one span in each block of each clip, its place drawn or the middle, none in padding."""
    inputs = batch.inputs
    count = inputs.shape[-1] // STRIDE
    blocks = math.ceil(inputs.shape[-1] / (STRIDE * BLOCK))
    place = torch.full((len(inputs), blocks, 1), 0.5, device=inputs.device)
    if generator is not None:
        place.uniform_(generator=generator)
    first = (place * (BLOCK - SPAN + 1)).long()
    offset = torch.arange(BLOCK, device=inputs.device)
    mask = (offset >= first) & (offset < first + SPAN)  # [B, blocks, BLOCK]
    return mask.flatten(1)[:, :count] & within(count, batch.lengths // STRIDE)  # type: ignore[arg-type, operator]


def segment_ends(count: int, lengths: Tensor) -> Tensor:
    """Return where frames of clips [B, N], end to end, change between clip and padding: [2B + 1] int32, from 0."""
    starts = count * torch.arange(len(lengths), device=lengths.device)
    ends = torch.stack((starts + lengths, starts + count), dim=1)  # [B, 2]
    return F.pad(ends.flatten(), (1, 0)).int()


def within(count: int, lengths: Tensor) -> Tensor:
    """Return which of `count` places lie within the lengths [B], without asking the device how long they are."""
    return torch.arange(count, device=lengths.device) < lengths[:, None]


class Convolution(nn.Module):
    """A Conformer's convolution module, for clips of different lengths.

    torchaudio's lets padding in, through its depthwise convolution and its normalisation. Here the padding is made zero
    before the convolution, and each frame is normalised by itself. Kernels of size 1 are the linear layers they equal.
    """

    def __init__(self, width: int):
        super().__init__()
        self.widen = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GLU())
        self.depthwise = nn.Conv1d(width, width, KERNEL, padding=KERNEL // 2, groups=width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return frames [N, B, D] convolved over time; those that `padding` [B, N] marks count as zeros."""
        x = self.widen(x).permute(1, 2, 0).masked_fill(padding[:, None], 0)
        return self.out(self.depthwise(x).permute(2, 0, 1))


class Block(ConformerLayer):
    """torchaudio's Conformer layer around a convolution module that knows where clips end.

    `varlen` makes its attention of the ends of clips in place of a mask, which flash attention does not take.
    """

    varlen = False

    def __init__(self, width: int, heads: int):
        super().__init__(width, 4 * width, heads, KERNEL)
        self.conv_module = Convolution(width)

    def forward(self, input: Tensor, padding: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        """Return frames [N, B, D] after attention and convolution; `padding` [B, N], and `ends` by `segment_ends`."""
        x = input + 0.5 * self.ffn1(input)
        query = self.self_attn_layer_norm(x)
        if self.varlen:
            attended = self.attention_by_ends(query, ends)
        else:
            attended, _ = self.self_attn(query, query, query, key_padding_mask=padding, need_weights=False)
        x = x + attended
        x = x + self.conv_module(x, padding)
        return self.final_layer_norm(x + 0.5 * self.ffn2(x))

    def attention_by_ends(self, query: Tensor, ends: Tensor) -> Tensor:
        """Return attention over frames [N, B, D] inside each clip; padding attends to itself, and nothing to it.

        So no frame is moved, and the host need not know how many there are.
        """
        layer = self.self_attn
        n, b, _ = query.shape
        qkv = F.linear(query.transpose(0, 1), layer.in_proj_weight, layer.in_proj_bias)  # [B, N, 3D]
        qkv = qkv.flatten(0, 1).unflatten(-1, (3, layer.num_heads, -1))  # [B * N, 3, H, E]
        query, key, value = qkv.unbind(1)
        attended: Any = varlen_attn(query, key, value, ends, ends, n, n)
        attended = attended.flatten(1).unflatten(0, (b, n))  # [B, N, D]
        return layer.out_proj(attended.transpose(0, 1))


class SpeechNet(nn.Module):
    """Spectrograms [B, M, F], lengths [B], mask [B, N] -> (logits [B, N, K], codes [B, N]) of N = F // 4 frames."""

    def __init__(self, size: NetSize):
        super().__init__()
        width = size.width
        self.unseen = nn.Parameter(torch.zeros(BANDS, 1))  # in place of masked frames
        self.stem = nn.ModuleList((nn.Conv1d(BANDS, width, 3, 2, 1), nn.Conv1d(width, width, 3, 2, 1)))
        self.blocks = nn.ModuleList(Block(width, width // size.unit) for _ in range(size.depth))
        self.head = nn.Linear(width, CODES)
        fixed = torch.Generator().manual_seed(0)  # the same codes for every seed of the weights
        self.register_buffer("projection", torch.randn(BANDS * STRIDE, CODE_SIZE, generator=fixed))
        self.register_buffer("codebook", F.normalize(torch.randn(CODE_SIZE, CODES, generator=fixed), dim=0))

    def forward(self, inputs: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and codes of the frames of `inputs` [B, M, F] that `mask` [B, N] hides from the net."""
        n = mask.shape[1]
        inputs = inputs[..., : STRIDE * n]
        lengths = lengths // STRIDE
        padding = ~within(n, lengths)
        ends = segment_ends(n, lengths)
        x = torch.where(mask.repeat_interleave(STRIDE, dim=1)[:, None], self.unseen, inputs)
        for layer, stride in zip(self.stem, (4, 2), strict=True):  # frames of its input in one of the net
            beyond = padding.repeat_interleave(stride, dim=1)[:, None]
            x = F.silu(layer(x.masked_fill(beyond, 0)))
        x = x.permute(2, 0, 1)  # [B, D, N] -> [N, B, D]
        for block in self.blocks:
            x = block(x, padding, ends)
        return self.head(x).transpose(0, 1), self.codes(inputs)

    @torch.no_grad()
    def codes(self, inputs: Tensor) -> Tensor:
        """Return the code of each four frames of spectrograms [B, M, 4N], [B, N]: the nearest by angle."""
        stacked = inputs.unflatten(-1, (-1, STRIDE)).permute(0, 2, 1, 3).flatten(2)  # [B, N, 4M]
        with torch.autocast(inputs.device.type, enabled=False):  # what is to be learned depends on no number format
            return (stacked.float() @ self.projection @ self.codebook).argmax(dim=-1)


def loss(model: nn.Module, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy of the codes over all masked frames, share of them guessed right in each clip [B])."""
    mask = masked(batch)
    logits, codes = model(batch.inputs, batch.lengths, mask)
    # A row for each frame: for [B, K, N] CUDA has no deterministic kernel.
    log_p = F.log_softmax(logits.float().transpose(1, 2), dim=1).transpose(1, 2).flatten(0, 1)  # [B * N, K]
    frame_loss = F.nll_loss(log_p, codes.flatten(), reduction="none").view_as(codes)
    mean = frame_loss.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)
    right = (logits.detach().argmax(dim=-1) == codes) & mask
    share = right.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return mean, share
