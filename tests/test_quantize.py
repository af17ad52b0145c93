"""A trained model made small: what is left of its size and its quality, what the file needs, and what is refused."""

import dataclasses
import json
import subprocess
import sys
import zipfile

import pytest
import tiny
import torch
from click.testing import CliRunner
from tiny import points
from torch import nn

from speedkit import fit, load_workload
from speedkit.cli import deploy as command
from speedkit.cli import find_trained
from speedkit.deploy import export
from speedkit.deploy.quantize import METHODS, exported, held, quantized_share, refused_by_gpu, why_not
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine

pytestmark = pytest.mark.filterwarnings("ignore")  # export's and torchao's, of what they do themselves

CPU = torch.device("cpu")
HERE = this_machine("cpu")
WIDE = {"size": 64, "hidden": 256}


class ConvNet(nn.Module):
    """Images [B, 3, 8, 8] -> logits [B, 4]."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1))

    def forward(self, x):
        return self.body(x).mean(dim=(2, 3))


def wide_net():
    torch.manual_seed(0)
    return points(**WIDE).model().eval()


def a_batch(*shape):
    return (torch.randn(8, *shape, generator=torch.Generator().manual_seed(1)),)


def quantized(method, model=None, args=None, **options):
    args = args or a_batch(64)
    return exported(model or wide_net(), method, args, calibration=[args], **options)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_outputs_to_its_precision_at_any_batch_size(method):
    model, args = wide_net(), a_batch(64)
    small = quantized(method, model, args).module()
    with torch.no_grad():
        batch = export.sized(args, 20)
        expected, found = model(*batch), small(*batch)
        assert (found - expected).norm() <= 0.05 * expected.norm()
        for size in (1, 8):
            assert torch.allclose(small(*export.sized(args, size)), found[:size], atol=0.01 * float(found.std()))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}, "the model itself has changed"


def test_int8_makes_a_model_of_linear_layers_small(tmp_path):
    # Large enough for weights to outweigh graph and archive.
    model, args = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval(), a_batch(512)
    plain = export.save(model, tmp_path / "plain.pt2", "none", args)
    for method in ("int8-dynamic", "int8-static"):
        small = export.save(model, tmp_path / "small.pt2", method, args, calibration=[args])
        assert small["size_bytes"] <= 0.35 * plain["size_bytes"]
        assert small["weights_bytes"] <= 0.3 * plain["weights_bytes"]
        assert small["quantized_share"] > 0.98 and plain["quantized_share"] == 0


def test_static_int8_quantizes_convolutions_and_drops_their_float32_weights():
    program = quantized("int8-static", ConvNet().eval(), a_batch(3, 8, 8))
    assert quantized_share(program) > 0.9
    assert all(tensor.numel() < 100 for tensor in held(program) if tensor.dtype == torch.float32)


ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchao", "speedkit"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
import torch.ao.quantization.fx._decomposed
inputs, expected = torch.load("expected.pt", weights_only=True)
with torch.no_grad():
    for path in sys.argv[1:]:
        found = torch.export.load(path).module()(*inputs)
        print(float((found - expected).norm() / expected.norm()))
"""


def test_the_files_load_without_speedkit_and_without_torchao(tmp_path):
    model, args, paths = wide_net(), a_batch(64), []
    for method in METHODS:
        paths.append(tmp_path / f"{method}.pt2")
        export.save(model, paths[-1], method, args, calibration=[args])
        with zipfile.ZipFile(paths[-1]) as archive:
            assert not any(b".py" in archive.read(name) for name in archive.namelist()), "no path of this machine"
    with torch.no_grad():
        torch.save((args, model(*args)), tmp_path / "expected.pt")
    asked = [sys.executable, "-W", "ignore", "-c", ALONE, *map(str, paths)]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [float(line) for line in done.stdout.splitlines()]
    assert len(errors) == len(METHODS) and max(errors) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_a_model_of_clips_of_any_length_stays_one(method):
    work = load_workload("speech", size="tiny", clips=24)
    model = work.model().eval()
    [args] = export.inputs_of(model, work, [next(export.batches(work, work.test, CPU))])
    small = quantized(method, model, args, varies=True).module()
    half = args[0].shape[-1] // 8 * 4
    cut = (args[0][..., :half], args[1].clamp(max=half), args[2][:, : half // 4])
    with torch.no_grad():
        expected = model(*cut)[0]
        assert (small(*cut)[0] - expected).norm() <= 0.1 * expected.norm()


def test_quality_is_compared_item_by_item_and_a_loss_is_positive_in_either_direction():
    work, good, bad = points(**WIDE), wide_net(), wide_net()
    bad[3].weight.data.neg_()
    bad[3].bias.data.neg_()
    same = export.quality(work, good, good, CPU)
    assert (same["drop"], same["low"], same["high"], same["n"]) == (0, 0, 0, 32)
    worse, better = (export.quality(work, *pair, CPU) for pair in ((good, bad), (bad, good)))
    assert worse["drop"] == -better["drop"] and worse["before"] == better["after"] and worse["drop"] != 0
    assert worse["low"] < worse["drop"] < worse["high"]
    lower = export.quality(dataclasses.replace(work, higher_is_better=False), good, bad, CPU)
    assert lower["drop"] == better["drop"]


# ---- the command ----


@pytest.fixture
def trained(tmp_path):
    work = points()
    fit(work, out=tmp_path / "trained", progress=False)
    return work, tmp_path / "trained"


def test_deploy_leaves_model_and_facts(trained, tmp_path):
    out = tmp_path / "out"
    options = ["--no-compile", "--pairs", "4", "--batch-size", "4", "--device", "cpu", "--max-drop", "0.5", "--out"]
    done = CliRunner().invoke(command, [str(trained[1]), "tiny:points", *options, str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "quality:" in done.output
    assert {path.name for path in out.iterdir()} == {"model.pt2", "deploy.json", ".speedkit-run"}
    facts = json.loads((out / "deploy.json").read_text())
    assert facts["size_bytes"] == (out / "model.pt2").stat().st_size
    assert {(row["batch_size"], row["b"]) for row in facts["measurements"]} == {
        (1, "int8-dynamic"),
        (4, "int8-dynamic"),
    }
    assert "float32" in {row["a"] for row in facts["measurements"]}
    assert torch.export.load(out / "model.pt2").module()(torch.zeros(5, 8)).shape == (5, 2)


def test_a_larger_drop_than_asked_is_refused_and_no_model_is_left(tmp_path):
    model = nn.Sequential(nn.Linear(24, 2, bias=False))
    # What decides is lost beside an outlier in the same row, which itself changes nothing.
    model[0].weight.data = torch.cat((torch.tensor([[-0.01], [0.01]]).expand(2, 23), torch.full((2, 1), 1000.0)), 1)
    blind = dataclasses.replace(points(size=24), features=without_the_last)
    with pytest.raises(SpeedkitError, match=r"a drop above 0\.01, so no model is left") as raised:
        export.deploy(blind, model, tmp_path / "out", device="cpu", compiled=False)
    assert raised.value.exit_code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".speedkit-run"}


def without_the_last(waveform):
    return torch.cat((waveform[..., :-1], torch.zeros_like(waveform[..., -1:])), -1)


# ---- what is refused ----


def test_layers_whose_int8_product_a_gpu_refuses_are_those_of_few_rows_and_odd_widths():
    model = nn.Sequential(nn.Linear(64, 60), nn.Linear(60, 64), nn.Linear(64, 64), nn.Flatten(), nn.Linear(64 * 17, 8))
    assert refused_by_gpu(model, (torch.randn(2, 17, 64),)) == ["0", "1", "4"]
    assert refused_by_gpu(model[2:3], (torch.randn(2, 16, 64),)) == ["2"]


def test_a_method_that_finds_nothing_says_what_it_is_for():
    with pytest.raises(UsageError, match="int8-dynamic finds nothing to quantize in ConvNet: products of linear"):
        quantized("int8-dynamic", ConvNet().eval(), a_batch(3, 8, 8))


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UsageError, match=r"needs the package torchao: install it with pip install -e \.\[quant\]"):
        quantized("int8-dynamic")


def test_what_this_machine_cannot_do_is_said_before_anything_is_done(tmp_path):
    assert why_not("int8-static", HERE) == why_not("int8-dynamic", HERE) == ""
    on_gpu = dataclasses.replace(HERE, device=torch.device("cuda"), gpu="A GPU", compute_capability=(8, 0))
    assert "int8-static is for x86 CPUs, not for A GPU" in why_not("int8-static", on_gpu)
    with pytest.raises(UsageError, match=r"there is no method 'int8-dynamc' \(did you mean int8-dynamic"):
        export.deploy(points(), points().model(), tmp_path / "out", device="cpu", method="int8-dynamc")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["tiny:fewer", "tiny:wider"])
def test_a_checkpoint_of_something_else_is_refused(trained, monkeypatch, other):
    monkeypatch.setattr(tiny, "fewer", lambda: points(train=95), raising=False)
    monkeypatch.setattr(tiny, "wider", lambda: points(hidden=17), raising=False)
    with pytest.raises(UsageError, match="does not fit: it is of workload points with 96 training items"):
        find_trained(trained[1], other, {})


def test_a_damaged_checkpoint_is_refused(trained, tmp_path):
    whole = (trained[1] / "checkpoint.pt").read_bytes()
    (tmp_path / "damaged.pt").write_bytes(whole[:-100])
    with pytest.raises(SpeedkitError, match=r"damaged.pt cannot be read"):
        find_trained(tmp_path / "damaged.pt", None, {})
