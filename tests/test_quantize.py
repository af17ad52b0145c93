"""A trained model made small: what is left of its size and its quality, what the file needs, and what is refused."""

import dataclasses
import json
import sys

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
from speedkit.deploy.quantize import METHODS, exported, quantized_share, refused_by_gpu, tensors_in, why_not
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine

pytestmark = pytest.mark.filterwarnings("ignore")  # export's and torchao's, of what they do themselves

WIDE = {"size": 64, "hidden": 256}


def wide_net():
    torch.manual_seed(0)
    return points(**WIDE).model().eval()


def a_batch(*shape):
    return (torch.randn(8, *shape, generator=torch.Generator().manual_seed(1)),)


@torch.no_grad()
def error_of(outputs, expected):
    return float((outputs - expected).norm() / expected.norm())


def test_every_method_keeps_the_outputs_at_any_batch_size_and_makes_files_as_small_as_it_promises(tmp_path):
    torch.manual_seed(0)
    # Large enough for weights to outweigh graph and archive.
    model, args = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval(), a_batch(512)
    facts = {}
    for method in METHODS:
        path = tmp_path / f"{method}.pt2"
        facts[method] = export.save(model, method, args, path=path, calibration=[args])
        assert sys.prefix.encode() not in path.read_bytes(), "it names files of this machine"
        small = torch.export.load(path).module()
        for size in (1, 8, 20):
            batch = export.sized(args, size)
            assert error_of(small(*batch), model(*batch)) <= 0.05
        assert facts[method]["size_bytes"] <= (1 if method == "none" else 0.35) * facts["none"]["size_bytes"]
        assert facts[method]["weights_bytes"] <= (1 if method == "none" else 0.3) * facts["none"]["weights_bytes"]
        assert (facts[method]["quantized_share"] > 0.98) == (method != "none") and not facts[method]["left_in_float32"]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}, "the model itself has changed"


def test_only_static_int8_quantizes_convolutions_and_it_drops_their_float32_weights():
    layers = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3), nn.AdaptiveAvgPool2d(1))
    model, args = nn.Sequential(*layers).eval(), a_batch(3, 8, 8)
    program = exported(model, "int8-static", args, calibration=[args])
    assert quantized_share(program) > 0.9
    assert all(tensor.numel() < 100 for tensor in tensors_in(program) if tensor.dtype == torch.float32)
    with pytest.raises(UsageError, match="int8-dynamic finds nothing to quantize in Sequential: products of linear"):
        exported(model, "int8-dynamic", args)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_a_model_of_clips_of_any_length_stays_one(method):
    work = load_workload("speech", size="tiny", clips=24)
    model = work.model().eval()
    [args] = export.inputs_of(model, work, work.test[: export.BATCH])
    small = exported(model, method, args, varies=True, calibration=[args]).module()
    half = args[0].shape[-1] // 8 * 4
    cut = (args[0][..., :half], args[1].clamp(max=half), args[2][:, : half // 4])
    assert error_of(small(*cut)[0], model(*cut)[0]) <= 0.1


def test_quality_is_compared_item_by_item_and_a_loss_is_positive_in_either_direction():
    work, good, bad = points(**WIDE), wide_net(), wide_net()
    bad[3].weight.data.neg_()
    bad[3].bias.data.neg_()
    same = export.quality(work, good, good)
    assert (same["drop"], same["low"], same["high"], same["n"]) == (0, 0, 0, 32)
    worse, better = export.quality(work, good, bad), export.quality(work, bad, good)
    assert worse["drop"] == -better["drop"] != 0 and worse["low"] < worse["drop"] < worse["high"]
    lower_is_better = dataclasses.replace(work, higher_is_better=False)
    assert export.quality(lower_is_better, good, bad)["drop"] == better["drop"]


# ---- the command ----


@pytest.fixture
def trained(tmp_path):
    fit(points(), out=tmp_path / "trained", progress=False)
    return tmp_path / "trained"


def test_deploy_leaves_model_and_facts(trained, tmp_path):
    out = tmp_path / "out"
    options = ["--no-compile", "--pairs", "4", "--batch-size", "4", "--device", "cpu", "--max-drop", "0.5", "--out"]
    done = CliRunner().invoke(command, [str(trained), "tiny:points", *options, str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert {path.name for path in out.iterdir()} == {"model.pt2", "deploy.json", ".speedkit-run"}
    facts = json.loads((out / "deploy.json").read_text())
    assert facts["size_bytes"] == (out / "model.pt2").stat().st_size
    rows = {(row["batch_size"], row["a"], row["b"]) for row in facts["measurements"]}
    assert rows >= {(1, "float32", "int8-dynamic"), (4, "float32", "int8-dynamic")}
    assert torch.export.load(out / "model.pt2").module()(torch.zeros(5, 8)).shape == (5, 2)


def without_the_last(waveform):
    return torch.cat((waveform[..., :-1], torch.zeros_like(waveform[..., -1:])), -1)


def test_a_larger_drop_than_asked_is_refused_and_no_model_is_left(tmp_path):
    model = nn.Sequential(nn.Linear(24, 2, bias=False))
    # What decides is lost beside an outlier in the same row, which itself changes nothing.
    model[0].weight.data = torch.cat((torch.tensor([[-0.01], [0.01]]).expand(2, 23), torch.full((2, 1), 1000.0)), 1)
    blind = dataclasses.replace(points(size=24), features=without_the_last)
    with pytest.raises(SpeedkitError, match=r"a drop above 0\.01, so no model is left") as raised:
        export.deploy(blind, model, tmp_path / "out", device="cpu", compiled=False)
    assert raised.value.exit_code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".speedkit-run"}


# ---- what is refused ----


def test_layers_whose_int8_product_a_gpu_refuses_are_those_of_few_rows_and_odd_widths():
    model = nn.Sequential(nn.Linear(64, 60), nn.Linear(60, 64), nn.Linear(64, 64), nn.Flatten(), nn.Linear(64 * 17, 8))
    assert refused_by_gpu(model, (torch.randn(2, 17, 64),)) == {model[0], model[1], model[4]}
    assert refused_by_gpu(model[2:3], (torch.randn(2, 16, 64),)) == {model[2]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU refuses none")
def test_on_a_gpu_refused_layers_stay_and_are_named(tmp_path):
    model, args = nn.Sequential(nn.Linear(64, 60), nn.Linear(60, 64), nn.Linear(64, 64)).cuda(), torch.randn(2, 17, 64)
    assert export.save(model, "int8-dynamic", (args.cuda(),), path=tmp_path / "m.pt2")["left_in_float32"] == ["0", "1"]


def test_what_cannot_be_quantized_here_says_why():
    cpu = this_machine("cpu")
    gpu = dataclasses.replace(cpu, device=torch.device("cuda"), gpu="A GPU", compute_capability=(8, 0))
    assert why_not("int8-static", cpu) == why_not("int8-dynamic", gpu) == ""
    assert "int8-static is for x86 CPUs, not for A GPU" in why_not("int8-static", gpu)
    with pytest.raises(UsageError, match=r"there is no method 'int8-dynamc' \(did you mean int8-dynamic"):
        why_not("int8-dynamc", cpu)


def test_a_checkpoint_of_something_else_or_a_damaged_one_is_refused(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "wider", lambda: points(hidden=17), raising=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        find_trained(trained, "tiny:wider", {})
    (tmp_path / "damaged.pt").write_bytes((trained / "checkpoint.pt").read_bytes()[:-100])
    with pytest.raises(ValueError, match="its checksum is wrong"):
        find_trained(tmp_path / "damaged.pt", None, {})
