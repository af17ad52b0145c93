"""The image workload: generated photographs, files of every sort, a loss of three parts, and a net that learns."""

import dataclasses
import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from speedkit.data.decode import BadItem
from speedkit.data.sources import Item
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.fit import fit
from speedkit.workloads.generated import in_classes
from speedkit.workloads.image import SIZES, ImageNet, augment, image, in_unit_range, load, loss
from speedkit.workloads.patterns import CLASSES, FORMATS, generate, photograph

# Mean pixels of photographs 0 to 9 of seed 0.
SEEN = [110.3, 151.5, 179.4, 151.8, 147.1, 105.2, 180.3, 132.5, 126.7, 129.4]
ORIENTATION = 0x0112  # the EXIF tag


@pytest.fixture(scope="module")
def patterns():
    return image(clips=60, size="tiny")


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


def own_data(root, count=4):
    for name in ("a", "b"):
        for number in range(count):
            saved(root / name / f"{name}{number}.{'png' if number % 2 else 'jpg'}")
    return root


def batch_of(size=6, side=48, classes=3):
    return torch.rand(size, 3, side, side), torch.arange(size) % classes


# --- generated photographs


def test_the_photographs_are_those_that_published_figures_were_measured_on():
    seen = [round(float(photograph(index).mean()), 1) for index in range(len(CLASSES))]
    assert seen == pytest.approx(SEEN, abs=0.2), "other photographs: raise patterns.VERSION and publish anew"


def test_files_on_disk_hold_the_photographs_and_a_larger_set_begins_with_the_smaller(tmp_path):
    small, large = generate(tmp_path, 40), generate(tmp_path, 50)
    assert small != large and len(list(large.rglob("*.*"))) == 50
    for index in range(40):
        path = small / in_classes(index, CLASSES, FORMATS)
        assert path.read_bytes() == (large / path.relative_to(small)).read_bytes()
        on_disk, made = np.asarray(Image.open(path), float), photograph(index)
        # JPEG keeps little of the noise of single pixels, which is cut off at white and black.
        assert np.array_equal(on_disk, made) if path.suffix == ".png" else abs(on_disk.mean() - made.mean()) < 8
    names = [path.name for path in small.rglob("*.*")]
    assert sum("_test." in name for name in names) == 10 and sum(name.endswith(".png") for name in names) == 10


def test_generated_workload_is_whole_and_pickles(patterns):
    assert patterns.classes == CLASSES and len(patterns.train) == 40 and len(patterns.test) == 20
    again, item = pickle.loads(pickle.dumps(patterns)), patterns.test[3]
    loaded = again.load(item)
    assert loaded.dtype == torch.uint8 and loaded.shape == (3, 48, 48)
    assert torch.equal(again.features(loaded), patterns.features(patterns.load(item)))


# --- files


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_camera_held_otherwise_makes_no_difference(tmp_path, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    turned = picture().rotate({1: 0, 3: 180, 6: 90, 8: 270}[orientation], expand=True)
    got = load(Item(str(saved(tmp_path / "a.jpg", turned, exif=exif, quality=95, subsampling=0)), 0), 24)
    assert got[0, :11, :3].float().mean() > 200 and got[2, 13:, 13:].float().mean() > 200
    assert got[0, 13:].float().mean() < 50


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_every_mode_of_a_file_becomes_rgb(tmp_path, mode):
    made = Image.fromarray(np.full((30, 20), 200, np.uint8)).convert("RGB").convert(mode)
    pixels = load(Item(str(saved(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), made)), 0), 16)
    expected = 255 if mode == "1" else 200
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 16, 16)
    assert abs(pixels.float().mean() - expected) < (60 if mode == "1" else 3)


def test_the_square_in_the_middle_is_scaled(tmp_path):
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 100
    path = str(saved(tmp_path / "a.png", Image.fromarray(pixels)))
    assert torch.equal(load(Item(path, 0), 10), torch.full((3, 10, 10), 100, dtype=torch.uint8))
    assert load(Item(path, 0), 33).shape == (3, 33, 33)  # smaller ones are scaled up


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_what_cannot_be_read_is_one_sentence(tmp_path, ending):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    for path in (cut(saved(tmp_path / f"cut.{ending}", noise)), tmp_path / f"gone.{ending}"):
        with pytest.raises(BadItem) as caught:
            load(Item(str(path), 0), 16)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert "no such file" in str(caught.value)


def test_bad_files_are_left_out_with_their_reasons(tmp_path):
    own_data(tmp_path, 30)
    (tmp_path / "a" / "zero.jpg").touch()
    (tmp_path / "b" / "text.jpg").write_text("not an image at all")
    mine = image(tmp_path, size="tiny")
    reasons = {Path(path).name: why for path, why in mine.quarantined}
    assert reasons == {"zero.jpg": "it is missing or empty"}
    assert len(mine.train) + len(mine.test) == 61 and mine.classes == ("a", "b") and mine.margin == 0.02
    cut(tmp_path / "a" / "a0.jpg")  # its beginning is whole: only decoding it tells
    history = fit(mine, Recipe(steps=2, epochs=None, batch_size=48), Plan(), device="cpu", progress=False)
    assert {Path(path).name for path in history.quarantined} == {"zero.jpg", "text.jpg", "a0.jpg"}
    for number in range(8):
        (tmp_path / "a" / f"bad{number}.jpg").touch()
    with pytest.raises(SpeedkitError, match=r"9 of 70 files cannot be used.*repair or remove"):
        image(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "huge"}, "size 'huge' is unknown.*tiny, small, medium"),
        ({"clips": 29}, "clips=29 is too few"),
        ({"label_pattern": "(a)"}, "needs image files.*--data-dir"),
        ({"data_dir": ".", "clips": 100}, "leave it out"),
        ({"data_dir": "nowhere"}, "nowhere does not exist"),
        ({"data_dir": "tests"}, r"no image files \(.jpg"),
        ({"data_dir": "."}, r"one class \(a\).*needs two"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(options, sentence, tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    if sentence.startswith("one class"):
        own_data(tmp_path)
        for path in (tmp_path / "b").iterdir():
            path.unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=sentence) as caught:
        image(**options)
    assert "\n" not in str(caught.value)


# --- the ways to the device


def losses(workload, tmp_path, **plan):
    recipe = Recipe(steps=3, epochs=None, batch_size=16, mixup=0.2, focal_gamma=1.0)
    plan = Plan(log_every=1, validate_every=0, **plan)
    return fit(workload, recipe, plan, device="cpu", cache_dir=tmp_path, progress=False).loss


def test_a_cache_of_images_keeps_one_byte_per_value(patterns, tmp_path):
    losses(patterns, tmp_path, cache="disk", cache_of="waveform")
    held = sum(path.stat().st_size for path in tmp_path.rglob("values.bin"))
    assert 60 * 3 * 48 * 48 <= held < 1.2 * 60 * 3 * 48 * 48


def test_augmentation_stays_in_range_and_follows_its_generator(patterns):
    inputs = torch.stack([patterns.features(patterns.load(item)) for item in patterns.train[:8]])
    one, other, again = (augment((inputs, None), torch.Generator().manual_seed(seed))[0] for seed in (1, 2, 1))
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, inputs)
    assert one.min() >= 0 and one.max() <= 1 and in_unit_range(torch.tensor([255], dtype=torch.uint8)).item() == 1


# --- the net


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_channels_that_suit_cpus_and_tensor_cores(size):
    net = ImageNet(10, size)
    assert net(torch.rand(2, 3, 32, 48)).shape == (2, 10)
    assert all(layer.out_channels % 16 == 0 for layer in net.modules() if isinstance(layer, torch.nn.Conv2d))


def test_micro_batches_and_channels_last_change_nothing():
    torch.manual_seed(0)
    net, batch = ImageNet(3, "tiny"), batch_of()
    gradients = []
    for layout in (torch.contiguous_format, torch.channels_last):
        net = net.to(memory_format=layout)
        for parts in (1, 3):
            net.zero_grad()
            for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
                (loss(net, part, Recipe(focal_gamma=2.0))[0] / parts).backward()
            gradients.append([parameter.grad.clone() for parameter in net.parameters()])
    for others in gradients[1:]:
        for expected, got in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3)


def test_weights_are_of_a_truncated_normal():
    net = ImageNet(10, "small")
    for layer in net.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            deviation = (2 / layer.weight[0].numel()) ** 0.5
            assert layer.weight.std().item() == pytest.approx(deviation, rel=0.08)
            cut_off = 2 * deviation / 0.8796
            assert 0.9 * cut_off < layer.weight.abs().max() < 1.001 * cut_off


# --- the loss


def by_formula(logits, targets, others, weight, smoothing, gamma):
    """The mean focal loss of soft targets, sample by sample, in float64."""
    total = 0.0
    for row, target, other, share in zip(logits.double(), targets, others, weight.double(), strict=True):
        p = row.exp() / row.exp().sum()
        q = torch.zeros_like(p)
        q[target] += share
        q[other] += 1 - share
        q = (1 - smoothing) * q + smoothing / len(q)
        total -= sum(q[k] * (1 - p[k]) ** gamma * p[k].log() for k in range(len(p)))
    return total / len(logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_is_its_formula(smoothing, gamma, mixed):
    logits, targets = torch.randn(6, 4), torch.arange(6) % 4
    others, weight = targets.flip(0), torch.linspace(0.5, 0.9, 6)
    if not mixed:
        weight = torch.ones(6)
    batch = (None, targets, *((others, weight) if mixed else ()))
    value, returned = loss(lambda _: logits, batch, Recipe(label_smoothing=smoothing, focal_gamma=gamma))
    assert returned is logits
    torch.testing.assert_close(value.double(), by_formula(logits, targets, others, weight, smoothing, gamma))
    if not mixed and gamma == 0:
        torch.testing.assert_close(value, F.cross_entropy(logits, targets, label_smoothing=smoothing))


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_gradients_of_a_certain_prediction_are_finite(gamma):
    logits = torch.tensor([[200.0, 0.0, 0.0], [-200.0, 0.0, 0.0]], requires_grad=True)
    value, _ = loss(lambda _: logits, (None, torch.tensor([0, 0])), Recipe(focal_gamma=gamma, label_smoothing=0.1))
    value.backward()
    assert value.isfinite() and logits.grad.isfinite().all()


# --- learning


def test_the_loop_learns_more_than_the_commonest_class():
    """Of four of the ten classes a constant answer gets a quarter right."""
    workload = image(clips=300, size="tiny")
    few = functools.partial(filter, lambda item: item.label in (2, 3, 6, 9))
    workload = dataclasses.replace(workload, train=[*few(workload.train)], test=[*few(workload.test)], augment=None)
    recipe = Recipe(steps=100, epochs=None, batch_size=20, learning_rate=1e-2, clip_norm=1.0)
    history = fit(workload, recipe, Plan(cache="ram", validate_every=0), device="cpu", progress=False)
    assert history.evaluation["n"] == 40 and history.evaluation["value"] > 0.375
    assert history.loss[-1] < 0.7 * history.loss[0]


@pytest.mark.slow
def test_compiled_bfloat16_gradients_are_finite_and_near():
    hardware = this_machine("cpu")
    if not hardware.supports("compile"):
        pytest.skip(hardware.why_not("compile"))
    net, batch = ImageNet(3, "tiny"), batch_of()
    gradients = []
    for forward in (net, torch.compile(net, dynamic=False)):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward is not net):
            value, _ = loss(forward, batch, Recipe(focal_gamma=2.0))
        value.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    assert gradients[1].isfinite().all() and F.cosine_similarity(*gradients, dim=0) > 0.98
