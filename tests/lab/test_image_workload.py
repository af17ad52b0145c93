"""The image workload: files of every sort, and a loss of three parts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from speedkit.data.batch import Batch
from speedkit.errors import BadItem
from speedkit.lab.sources import Item
from speedkit.lab.workloads import audio, image
from speedkit.recipe import Recipe


def saved(path, pixels, **options):
    """Write pixels [H, W, 3] or [H, W] to a file, as an image of `mode`."""
    image = Image.fromarray(pixels)
    image.convert(options.pop("mode", image.mode)).save(path, **options)
    return path


def read(path, side=16):
    return image.load(Item(str(path), 0), side)


def test_the_square_in_the_middle_is_scaled_as_the_camera_was_held(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 100
    assert torch.equal(read(saved(tmp_path / "a.png", wide), 10), torch.full((3, 10, 10), 100, dtype=torch.uint8))
    assert read(tmp_path / "a.png", 33).shape == (3, 33, 33)  # smaller ones are scaled up
    red_above = np.zeros((24, 24, 3), np.uint8)
    red_above[:12, :, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation: on its side
    turned = saved(tmp_path / "a.jpg", np.rot90(red_above).copy(), exif=exif, quality=95, subsampling=0)
    assert read(turned)[0, :7].float().mean() > 200 and read(turned)[0, 9:].float().mean() < 50


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_of_a_file_becomes_rgb(tmp_path, mode):
    path = saved(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), np.full((30, 20, 3), 200, np.uint8), mode=mode)
    pixels = read(path)
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 16, 16) and abs(pixels.float().mean() - 200) < 3


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    broken = [saved(tmp_path / name, noise) for name in ("a.jpg", "a.png")]
    for path in broken:
        path.write_bytes(path.read_bytes()[:2000])
    for path in (*broken, saved(tmp_path / "deep.png", np.full((20, 20), 60000, np.uint16)), tmp_path / "gone.jpg"):
        with pytest.raises(BadItem, match=path.name) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert "No such file" in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "smoothing", "gamma"),
    [(audio.loss, 0.0, 0.0), (audio.loss, 0.2, 0.0), (image.loss, 0.0, 2.0), (image.loss, 0.2, 0.5)],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_of_a_classifier_is_its_formula_with_a_slope_where_the_net_is_certain(loss, smoothing, gamma, mixed):
    logits, targets = torch.randn(6, 4), torch.arange(6) % 4
    recipe = Recipe(label_smoothing=smoothing, focal_gamma=gamma)
    others, weight = targets.flip(0), torch.linspace(0.5, 0.9, 6)[:, None] if mixed else torch.ones(6, 1)
    batch = Batch(None, targets, extra=(others, weight[:, 0]) if mixed else ())
    p = logits.softmax(dim=1)
    q = (1 - smoothing) * torch.lerp(F.one_hot(others).float(), F.one_hot(targets).float(), weight) + smoothing / 4
    expected = -(q * (1 - p) ** gamma * p.log()).sum(dim=1).mean()
    torch.testing.assert_close(loss(lambda _: logits, batch, recipe)[0], expected)
    certain = (200.0 * logits).requires_grad_()
    loss(lambda _: certain, batch, recipe)[0].backward()
    assert certain.grad.isfinite().all()
