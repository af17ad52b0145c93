"""The audio workload: log-mel spectrograms of short recordings, classified by a small residual convolutional net."""

import functools
import math
import operator
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchaudio.transforms import MelSpectrogram

from speedkit.lab import decode
from speedkit.lab.sources import Item
from speedkit.lab.workloads.augmentations import spec_augment
from speedkit.lab.workloads.generated import find_or_generate
from speedkit.lab.workloads.residual import class_probabilities, residual_net
from speedkit.lab.workloads.sizes import NetSize
from speedkit.lab.workloads.sounds import night_sounds
from speedkit.recipe import Recipe
from speedkit.workload import Batch, Workload, right_class

BANDS = 64  # mel bands, from 0 Hz to half the sample rate
# Channels of the first of three stages, and residual blocks in each.
SIZES = {"tiny": NetSize(16, 1), "small": NetSize(32, 1), "medium": NetSize(64, 2)}
RECIPE = Recipe(batch_size=32, epochs=8, learning_rate=3e-3, weight_decay=0.05, clip_norm=1.0)  # AdamW, one cycle


def audio(
    data_dir: str | Path | None = None, *, size: NetSize = SIZES["small"], max_duration_s: float = 10.0, **options: Any
) -> Workload:
    """Return the workload on the recordings under `data_dir`, or on generated night sounds without one.

    All clips are brought to the commonest sample rate and to the length that 99 % of them do not exceed, at most
    `max_duration_s`. `options` are those of `find_items`, and `clips`. Raises UsageError for unusable data.
    """
    files = find_or_generate(data_dir, night_sounds, **options)
    frame = framing(files.train)
    rate_hz, hop = frame["sample_rate_hz"], frame["hop"]
    usual_s = float(np.quantile([item.duration_s for item in files.train], 0.99, method="inverted_cdf"))
    hops = math.ceil(round(min(usual_s, max_duration_s) * rate_hz / hop, 6))
    num_samples = hop * max(16, hops)  # 16 frames: what the net's strides leave something of
    return Workload(
        "audio",
        RECIPE,
        **vars(files),  # train, test, classes, quarantined
        load=functools.partial(load, sample_rate_hz=rate_hz, num_samples=num_samples),
        features=functools.partial(log_mel, **frame, bands=BANDS),
        target=operator.attrgetter("label"),
        model=functools.partial(AudioNet, len(files.classes), size),
        loss=loss,
        score=right_class,
        augment=spec_augment,
        honours=("label_smoothing", "mixup"),
        decoders=("torchcodec",),
        # Two standard errors of an accuracy of 0.9 on the generated test files.
        margin=0.02 if data_dir or options.get("labels") else 0.03,
        parameters={**frame, "bands": BANDS, "num_samples": num_samples},
        sources=(decode.load_audio,),
    )


def framing(items: Sequence[Item]) -> dict[str, Any]:
    """Return what `log_mel` takes for the commonest sample rate of `items`: a frame of about 28 ms each 10 ms."""
    rate_hz = statistics.mode(item.sample_rate_hz for item in items)
    n_fft = 2 ** round(math.log2(0.028 * rate_hz))
    return {"sample_rate_hz": rate_hz, "n_fft": n_fft, "hop": round(rate_hz / 100)}


def load(item: Item, sample_rate_hz: int, num_samples: int, *, decoder: str = "soundfile") -> Tensor:
    """Return the item's waveform [T] float32."""
    return decode.load_audio(item.path, sample_rate_hz, num_samples, decoder=decoder)


@functools.lru_cache(maxsize=8)
def mel_transform(device: torch.device, **options: int) -> MelSpectrogram:
    """Return torchaudio's transform; its window and filters are computed once per process and device."""
    return MelSpectrogram(**options).to(device)


def log_mel(waveform: Tensor, sample_rate_hz: int, n_fft: int, *, hop: int, bands: int) -> Tensor:
    """Return the log-mel spectrogram of each waveform [..., T], of mean 0 and variance 1: [..., 1, bands, T // hop].

    One waveform [T] gives the same bits in any process and with any number of threads: no sum is shared between them.
    """
    transform = mel_transform(waveform.device, n_mels=bands, sample_rate=sample_rate_hz, n_fft=n_fft, hop_length=hop)
    power = transform(waveform)[..., : waveform.shape[-1] // hop]  # [..., bands, F]
    decibel = 10 * torch.log10(power + 1e-10)
    loudest = decibel.amax(dim=(-2, -1), keepdim=True)
    decibel = torch.maximum(decibel, loudest - 80)  # silence must not set the scale
    mean = decibel.mean(dim=-1).mean(dim=-1)[..., None, None]
    deviation = (decibel - mean).square_().mean(dim=-1).mean(dim=-1)[..., None, None].sqrt()
    return ((decibel - mean) / (deviation + 1e-5))[..., None, :, :]


class AudioNet(nn.Module):
    """Spectrograms [B, 1, 64, F] -> logits [B, K]. Pooled over time only: where a sound lies in frequency matters."""

    def __init__(self, classes: int, size: NetSize):
        super().__init__()
        widths = [round(size.width * multiple) for multiple in size.growth]
        # Out of the stem comes [B, C, 32, F / 4]: sounds change more slowly than 10 ms frames.
        self.blocks = residual_net(nn.Conv2d(1, widths[0], (5, 9), (2, 4), (2, 4), bias=False), widths, size.depth)
        self.head = nn.Linear(2 * widths[-1] * (BANDS // 16), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)  # [B, C, 4, F / 32]
        # max, not amax: amax's gradient looks for elements equal to the maximum, and compiled bfloat16 code, keeping
        # one of the two unrounded, finds none and divides by zero.
        pooled = torch.cat((x.mean(dim=3), x.max(dim=3).values), dim=1)  # [B, 2C, 4]
        return self.head(pooled.flatten(1))


def loss(model: nn.Module, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy over the batch, logits [B, K])."""
    logits = model(batch.inputs)
    targets = batch.targets
    if batch.extra:  # mixup
        targets = class_probabilities(batch, logits.shape[1])
    return F.cross_entropy(logits, targets, label_smoothing=recipe.label_smoothing), logits
