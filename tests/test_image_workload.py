"""The image workload: files of every sort, a loss of three parts, and weights that start truncated."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from speedkit.data.decode import BadItem
from speedkit.data.sources import Item
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.fit import fit
from speedkit.workloads.image import image, load, loss

ORIENTATION = 0x0112  # the EXIF tag


def picture(height=24, width=40):
    """An image [H, W, 3] whose upper left quarter is red, on blue."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 2] = 255
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    return Image.fromarray(pixels)


def saved(path, made=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (made or picture()).save(path, **options)
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_a_camera_held_otherwise_makes_no_difference(tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # on its side
    turned = picture().rotate(90, expand=True)
    path = str(saved(tmp_path / "a.jpg", turned, exif=exif, quality=95, subsampling=0))
    red, _, blue = load(Item(path, 0), 24).float()
    assert red[:11, :3].mean() > 200 and red[13:].mean() < 50 and blue[13:, 13:].mean() > 200


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_of_a_file_becomes_rgb(tmp_path, mode):
    made = Image.fromarray(np.full((30, 20), 200, np.uint8)).convert("RGB").convert(mode)
    pixels = load(Item(str(saved(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), made)), 0), 16)
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 16, 16) and abs(pixels.float().mean() - 200) < 3


def test_the_square_in_the_middle_is_scaled(tmp_path):
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 100
    path = str(saved(tmp_path / "a.png", Image.fromarray(pixels)))
    assert torch.equal(load(Item(path, 0), 10), torch.full((3, 10, 10), 100, dtype=torch.uint8))
    assert load(Item(path, 0), 33).shape == (3, 33, 33)  # smaller ones are scaled up


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    deep = Image.fromarray(np.full((20, 20), 60000, np.uint16))
    broken = [cut(saved(tmp_path / f"cut.{ending}", noise)) for ending in ("jpg", "png")]
    for path in (*broken, saved(tmp_path / "deep.png", deep), tmp_path / "gone.jpg"):
        with pytest.raises(BadItem) as caught:
            load(Item(str(path), 0), 16)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert "No such file" in str(caught.value)


def test_bad_files_are_left_out_with_their_reasons(tmp_path):
    for name in ("a", "b"):
        for number in range(60):
            saved(tmp_path / name / f"{name}{number}.{'png' if number % 2 else 'jpg'}")
    (tmp_path / "a" / "zero.jpg").touch()
    (tmp_path / "b" / "text.jpg").write_text("not an image at all")
    mine = image(tmp_path, size="tiny")
    assert len(mine.train) + len(mine.test) == 122 and mine.classes == ("a", "b") and mine.margin == 0.02
    cut(tmp_path / "a" / "a0.jpg")  # its beginning is whole: only decoding it tells
    history = fit(mine, Recipe(steps=2, epochs=None, batch_size=49), Plan(), device="cpu", progress=False)
    assert {Path(path).name for path in history.quarantined} == {"zero.jpg", "text.jpg", "a0.jpg"}


@pytest.mark.parametrize(("smoothing", "gamma"), [(0.0, 0.0), (0.2, 0.0), (0.0, 2.0), (0.2, 0.5)])
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_is_its_formula(smoothing, gamma, mixed):
    logits, targets = torch.randn(6, 4), torch.arange(6) % 4
    others, weight = targets.flip(0), torch.linspace(0.5, 0.9, 6) if mixed else torch.ones(6)
    batch = (None, targets, *((others, weight) if mixed else ()))
    value, _ = loss(lambda _: logits, batch, Recipe(label_smoothing=smoothing, focal_gamma=gamma))
    p, total = logits.double().softmax(dim=1), 0.0
    for row in range(6):
        q = torch.full((4,), smoothing / 4, dtype=torch.float64)
        q[targets[row]] += (1 - smoothing) * weight[row]
        q[others[row]] += (1 - smoothing) * (1 - weight[row])
        total -= sum(q[k] * (1 - p[row, k]) ** gamma * p[row, k].log() for k in range(4))
    torch.testing.assert_close(value.double(), total / 6)


def test_gradients_of_a_certain_prediction_are_finite():
    logits = torch.tensor([[200.0, 0.0, 0.0], [-200.0, 0.0, 0.0]], requires_grad=True)
    value, _ = loss(lambda _: logits, (None, torch.tensor([0, 0])), Recipe(focal_gamma=0.5, label_smoothing=0.1))
    value.backward()
    assert value.isfinite() and logits.grad.isfinite().all()
