"""What the audio and the image classifier share: residual blocks of convolutions, and the score."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedkit.workload import Batch


class GroupNorm(nn.GroupNorm):
    """Group normalisation in the format of its input, also under CUDA's autocast.

    Autocast would compute it in float32 and keep two float32 copies for the backward pass, a third more memory than in
    float32. The kernel adds up in float32 either way; an NHWC input it copies twice.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [B, C, ...], normalised."""
        if input.device.type != "cuda":
            return super().forward(input)
        with torch.autocast("cuda", enabled=False):
            # The kernel wants weights of its input's format.
            weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
            return F.group_norm(input, self.num_groups, weight, bias, self.eps)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut. Samples are normalised, not batches: micro-batches change nothing.

    All channels are one group: with eight, a slow NHWC kernel of the CPU takes all that bfloat16 gains.
    """

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            GroupNorm(1, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            GroupNorm(1, channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, C_in, H, W] -> [B, C, H / stride, W / stride]
        return F.relu(self.body(x) + self.shortcut(x))


def residual_net(stem: nn.Conv2d, widths: Sequence[int], depth: int) -> nn.Sequential:
    """Return `stem`, and a stage of `depth` blocks for each width; a stage halves both sides of what it takes."""
    layers: list[nn.Module] = [stem, GroupNorm(1, stem.out_channels), nn.ReLU()]
    channels = stem.out_channels
    for width in widths:
        layers.append(ResidualBlock(channels, width, 2))
        layers += [ResidualBlock(width, width, 1) for _ in range(depth - 1)]
        channels = width
    return nn.Sequential(*layers)


def class_probabilities(batch: Batch, classes: int) -> Tensor:
    """Return the targets of a batch as probabilities [B, K], where it went through mixup of two classes each."""
    probabilities = F.one_hot(batch.targets, classes).float()
    if batch.extra:
        others, weight = batch.extra
        probabilities = torch.lerp(F.one_hot(others, classes).float(), probabilities, weight[:, None])
    return probabilities
