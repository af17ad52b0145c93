"""Generated photographs of patterned cloth and walls, in eight classes."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from speedkit.lab.workloads.generated import complete, in_classes

Plane = NDArray[np.float32]  # [H, W]


# Each class says where its ink is, by the coordinates u and v on the pattern in periods and by its line width.


def checks(u: Plane, v: Plane, line: float) -> NDArray:
    return (u % 1 < 0.5) ^ (v % 1 < 0.5)


def dots(u: Plane, v: Plane, line: float) -> NDArray:
    return from_centre(u, v) < 0.15 + line / 2


def lattice(u: Plane, v: Plane, line: float) -> NDArray:
    return (u % 1 < line) | (v % 1 < line)


def rings(u: Plane, v: Plane, line: float) -> NDArray:
    return np.abs(from_centre(u, v) - 0.3) < line / 3


def stripes(u: Plane, v: Plane, line: float) -> NDArray:
    return u % 1 < line + 0.15


def waves(u: Plane, v: Plane, line: float) -> NDArray:
    return (v + 0.2 * np.sin(2 * np.pi * u)) % 1 < line + 0.15


def weave(u: Plane, v: Plane, line: float) -> NDArray:
    is_odd = (np.floor(u) + np.floor(v)) % 2
    return np.where(is_odd, u, v) * 3 % 1 < line + 0.2


def zigzags(u: Plane, v: Plane, line: float) -> NDArray:
    return (v + 0.4 * np.abs(2 * (u % 1) - 1)) % 1 < line + 0.15


def from_centre(u: Plane, v: Plane) -> NDArray:
    """Return the distance from the centre of the period."""
    return np.hypot(u % 1 - 0.5, v % 1 - 0.5)


PATTERNS = (checks, dots, lattice, rings, stripes, waves, weave, zigzags)


def patterns(clips: int = 1200) -> Path:
    """Return a folder of class-named subfolders with images: two thirds to train on, the others to test on."""
    paths = in_classes(clips, [pattern.__name__ for pattern in PATTERNS], formats=("jpg", "jpg", "jpg", "png"))
    return complete(f"patterns/{clips}_photographs_seed0_v3", paths, photograph, save=save)


def save(path: Path, pixels: NDArray[np.uint8], format: str) -> None:
    """Write an image as JPEG or PNG."""
    Image.fromarray(pixels).save(path, format.replace("jpg", "jpeg"), quality=75)


def photograph(index: int) -> NDArray[np.uint8]:
    """Return photograph `index` of the set: [H, W, 3], either side of 80 to 160 pixels."""
    rng = np.random.default_rng([0, index])
    height, width = rng.integers(80, 161, 2)
    periods = np.exp(rng.uniform(np.log(4), np.log(6)))  # along the shorter side
    y, x = np.mgrid[:height, :width] * (periods / min(height, width))
    turn = rng.uniform(-0.3, 0.3)
    left, top = rng.uniform(0, 10, 2)
    u = np.cos(turn) * x - np.sin(turn) * y + left
    v = np.sin(turn) * x + np.cos(turn) * y + top
    ink = PATTERNS[index % len(PATTERNS)](u, v, rng.uniform(0.15, 0.4))
    ground = rng.uniform(0.2, 0.8, 3)
    contrast = rng.uniform(0.2, 0.45) * rng.choice([-1, 1], 3)
    image = gaussian_filter(ground + ink[..., None] * contrast, (1.0, 1.0, 0))
    image += rng.normal(0, rng.uniform(0.03, 0.12), image.shape)  # of the sensor
    return (255 * np.clip(image, 0, 1)).round().astype(np.uint8)
