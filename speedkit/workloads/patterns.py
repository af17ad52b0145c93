"""Photographs of patterned cloth and walls: eight classes, in class-named subfolders.

A photograph is a function of its index alone: they can be made in any order, and a larger set begins with the
smaller. Neither torch nor a font or texture from elsewhere is needed.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from speedkit.workloads.generated import complete, in_classes

CLIPS = 1200  # 800 to train on, 25 whole batches of 32, and 400 to test on
PIXELS = (80, 161)  # of either side of a photograph, drawn apart
VERSION = 2  # part of the folder's name: raise it when a photograph changes
FORMATS = ("jpg", "jpg", "jpg", "png")  # of the takes in turn

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
CLASSES = tuple(PATTERNS)


def photograph(index: int) -> NDArray[np.uint8]:
    """Return photograph `index` of the set: [H, W, 3]; its class is CLASSES[index % 8]."""
    rng = np.random.default_rng([0, index])
    height, width = rng.integers(*PIXELS, 2)
    y, x = np.mgrid[:height, :width] * (np.exp(rng.uniform(np.log(4), np.log(9))) / min(height, width))  # periods
    turn, (left, top) = rng.uniform(-0.8, 0.8), rng.uniform(0, 10, 2)
    u, v = np.cos(turn) * x - np.sin(turn) * y + left, np.sin(turn) * x + np.cos(turn) * y + top
    ink = PATTERNS[CLASSES[index % len(CLASSES)]](u, v, rng.uniform(0.15, 0.4))
    ground, contrast = rng.uniform(0.2, 0.8, 3), rng.uniform(0.1, 0.4) * rng.choice([-1, 1], 3)
    image = gaussian_filter(ground + ink[..., None] * contrast, (1.0, 1.0, 0))
    image += rng.normal(0, rng.uniform(0.05, 0.25), image.shape)  # of the sensor
    return (255 * np.clip(image, 0, 1)).round().astype(np.uint8)


def generate(clips: int = CLIPS) -> Path:
    """Return a folder of class-named subfolders with `clips` images (JPEG, PNG), as `complete` makes it."""

    def write(index: int, path: Path, format: str) -> None:
        Image.fromarray(photograph(index)).save(path, "JPEG" if format == "jpg" else "PNG", quality=75)

    paths = [in_classes(index, CLASSES, FORMATS) for index in range(clips)]
    return complete(f"patterns/{clips}_photographs_seed0_v{VERSION}", paths, write)
