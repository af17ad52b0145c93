"""Generated photographs of patterned cloth and walls, in eight classes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from speedkit.lab.workloads.generated import complete, in_classes

Plane = NDArray[np.float32]  # [H, W]
# Each class: where its ink is, by the coordinates u and v on the pattern in periods and by its line width.
PATTERNS: dict[str, Callable[[Plane, Plane, float], NDArray]] = {
    "checks": lambda u, v, line: (u % 1 < 0.5) ^ (v % 1 < 0.5),
    "dots": lambda u, v, line: np.hypot(u % 1 - 0.5, v % 1 - 0.5) < 0.15 + line / 2,
    "lattice": lambda u, v, line: (u % 1 < line) | (v % 1 < line),
    "rings": lambda u, v, line: np.abs(np.hypot(u % 1 - 0.5, v % 1 - 0.5) - 0.3) < line / 3,
    "stripes": lambda u, v, line: u % 1 < line + 0.15,
    "waves": lambda u, v, line: (v + 0.2 * np.sin(2 * np.pi * u)) % 1 < line + 0.15,
    "weave": lambda u, v, line: np.where((np.floor(u) + np.floor(v)) % 2, u, v) * 3 % 1 < line + 0.2,
    "zigzags": lambda u, v, line: (v + 0.4 * np.abs(2 * (u % 1) - 1)) % 1 < line + 0.15,
}


def patterns(clips: int = 1200) -> Path:
    """Return a folder of class-named subfolders with images: two thirds to train on, the others to test on."""
    paths = in_classes(clips, tuple(PATTERNS), ("jpg", "jpg", "jpg", "png"))
    return complete(f"patterns/{clips}_photographs_seed0_v3", paths, photograph, save=save)


def save(path: Path, pixels: NDArray[np.uint8], format: str) -> None:
    """Write an image as JPEG or PNG."""
    Image.fromarray(pixels).save(path, "JPEG" if format == "jpg" else "PNG", quality=75)


def photograph(index: int) -> NDArray[np.uint8]:
    """Return photograph `index` of the set: [H, W, 3], either side of 80 to 160 pixels."""
    rng = np.random.default_rng([0, index])
    height, width = rng.integers(80, 161, 2)
    y, x = np.mgrid[:height, :width] * (np.exp(rng.uniform(np.log(4), np.log(6))) / min(height, width))  # periods
    turn, (left, top) = rng.uniform(-0.3, 0.3), rng.uniform(0, 10, 2)
    u, v = np.cos(turn) * x - np.sin(turn) * y + left, np.sin(turn) * x + np.cos(turn) * y + top
    pattern = list(PATTERNS.values())[index % len(PATTERNS)]
    ink = pattern(u, v, rng.uniform(0.15, 0.4))
    ground, contrast = rng.uniform(0.2, 0.8, 3), rng.uniform(0.2, 0.45) * rng.choice([-1, 1], 3)
    image = gaussian_filter(ground + ink[..., None] * contrast, (1.0, 1.0, 0))
    image += rng.normal(0, rng.uniform(0.03, 0.12), image.shape)  # of the sensor
    return (255 * np.clip(image, 0, 1)).round().astype(np.uint8)
