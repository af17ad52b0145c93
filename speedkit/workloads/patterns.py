"""Photographs of patterned cloth and walls: ten classes, seen from all sides, in class-named subfolders.

A photograph is a function of its index alone: they can be made in any order, and a larger set begins with the
smaller. Neither torch nor a font or texture from elsewhere is needed.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter, zoom

from speedkit.workloads.generated import complete, in_classes

CLIPS = 1200  # 800 to train on, 25 whole batches of 32, and 400 to test on
PIXELS = (80, 161)  # of either side of a photograph, drawn apart
PERIODS = (3.5, 6.5)  # of the pattern across the shorter side
CONTRAST = (0.2, 0.7)  # between the pattern's two colours, of the range of a pixel
TURN = 0.6  # radians either way
NOISE = (0.01, 0.08)  # of the sensor: standard deviation
VERSION = 1  # part of the folder's name: raise it when a photograph changes
FORMATS = ("jpg", "jpg", "jpg", "png")  # of the takes in turn

Plane = NDArray[np.float32]  # [H, W]
# Each class: where its ink is, by the coordinates u and v on the pattern in periods, its line width 0.15 to 0.4, and
# how much it swings or is shifted, 0.25 to 0.6.
PATTERNS: dict[str, Callable[[Plane, Plane, float, float], NDArray]] = {
    "bricks": lambda u, v, line, swing: (v % 1 < line / 1.5) | ((u / 2 + swing * (np.floor(v) % 2)) % 1 < line / 3),
    "checks": lambda u, v, line, swing: (u % 1 < 0.5) ^ (v % 1 < 0.5),
    "dots": lambda u, v, line, swing: (
        np.hypot(u % 1 - 0.5, (v + swing * (np.floor(u) % 2)) % 1 - 0.5) < 0.15 + line / 2
    ),
    "lattice": lambda u, v, line, swing: (u % 1 < line) | (v % 1 < line),
    "rings": lambda u, v, line, swing: np.abs(np.hypot(u % 1 - 0.5, v % 1 - 0.5) - 0.3) < line / 3,
    "scales": lambda u, v, line, swing: np.abs(np.hypot((u + np.floor(v) % 2 / 2) % 1 - 0.5, v % 1) - 0.6) < line / 2.5,
    "stripes": lambda u, v, line, swing: u % 1 < line + 0.15,
    "waves": lambda u, v, line, swing: (v + swing * np.sin(2 * np.pi * u) / 2) % 1 < line + 0.15,
    "weave": lambda u, v, line, swing: np.where((np.floor(u) + np.floor(v)) % 2, u, v) * 3 % 1 < line + 0.2,
    "zigzags": lambda u, v, line, swing: (v + swing * np.abs(2 * (u % 1) - 1)) % 1 < line + 0.15,
}
CLASSES = tuple(PATTERNS)


def plane(rng: Generator, height: int, width: int) -> tuple[Plane, Plane]:
    """Return where on the pattern each pixel looks, in periods: turned, in perspective, on cloth that is not flat."""
    short = min(height, width)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    x, y = (2 * x - width) / short, (2 * y - height) / short  # -1..1 along the shorter side
    depth = 1 + np.tensordot(rng.uniform(-0.2, 0.2, 2), (x, y), 1) * short / max(height, width)
    turn, stretch = rng.uniform(-TURN, TURN), np.exp(rng.uniform(-0.2, 0.2))
    scale = np.exp(rng.uniform(*np.log(PERIODS))) / 2 / depth
    u = scale * stretch * (np.cos(turn) * x - np.sin(turn) * y) + rng.uniform(0, 10)
    v = scale / stretch * (np.sin(turn) * x + np.cos(turn) * y) + rng.uniform(0, 10)
    fold, phase = rng.uniform(0, 0.15, 2), rng.uniform(0, 2 * np.pi, 2)
    return u + fold[0] * np.sin(v + phase[0]), v + fold[1] * np.sin(u + phase[1])


def cloud(rng: Generator, height: int, width: int, cells: int) -> NDArray:
    """Return a smooth random surface [H, W], mostly within -1..1, that changes `cells` times along a side."""
    coarse = rng.uniform(-1, 1, (cells + 1, cells + 1))
    return zoom(coarse, (height / (cells + 1), width / (cells + 1)), order=3, mode="nearest", grid_mode=True)


def photograph(index: int) -> NDArray[np.uint8]:
    """Return photograph `index` of the set: [H, W, 3]; its class is CLASSES[index % 10]."""
    rng = np.random.default_rng([0, index])
    height, width = map(int, rng.integers(*PIXELS, 2))
    # Four samples per pixel, averaged: edges are as soft as a lens makes them.
    u, v = plane(rng, 2 * height, 2 * width)
    ink = PATTERNS[CLASSES[index % len(CLASSES)]](u, v, rng.uniform(0.15, 0.4), rng.uniform(0.25, 0.6))
    ink = ink.reshape(height, 2, width, 2).mean(axis=(1, 3))
    if rng.random() < 0.5:
        ink = 1 - ink
    ink = ink * (1 - 0.5 * np.clip(cloud(rng, height, width, 3), 0, 1))  # worn in places
    ground = rng.uniform(0.15, 0.85, 3)
    change = rng.normal(0, 1, 3)
    change *= rng.uniform(*CONTRAST) * np.sqrt(3) / np.linalg.norm(change)
    image = ground + ink[..., None] * change + 0.03 * cloud(rng, height, width, 12)[..., None]  # [H, W, 3]
    image = image * (1 + 0.4 * cloud(rng, height, width, int(rng.integers(1, 4))))[..., None]  # light and shadow
    blur = rng.uniform(0, 1.2)
    image = gaussian_filter(image, (blur, blur, 0)) + rng.normal(0, rng.uniform(*NOISE), image.shape)
    return (255 * np.clip(image, 0, 1)).round().astype(np.uint8)


def generate(clips: int = CLIPS) -> Path:
    """Return a folder of class-named subfolders with `clips` images (JPEG, PNG), as `complete` makes it."""

    def write(index: int, path: Path, format: str) -> None:
        quality = int(np.random.default_rng([0, index, 1]).integers(40, 96))
        Image.fromarray(photograph(index)).save(path, "JPEG" if format == "jpg" else "PNG", quality=quality)

    paths = [in_classes(index, CLASSES, FORMATS) for index in range(clips)]
    return complete(f"patterns/{clips}_photographs_seed0_v{VERSION}", paths, write)
