"""A trained model made small: what is left of its size and its quality, what the file needs, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from click.testing import CliRunner
from tiny import points
from torch import nn

from speedkit import fit, load_workload
from speedkit.commands import deploy as command
from speedkit.commands import read_trained
from speedkit.deploy import load, trial
from speedkit.deploy.quantize import METHODS, exported, held, quantized_share, why_not
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine

pytestmark = pytest.mark.filterwarnings("ignore")  # export's and torchao's, of what they do themselves

HERE = this_machine("cpu")
ON_CPU = [name for name in METHODS if name != "fp8"]
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


# ---- what it gives ----


@pytest.mark.parametrize("method", ON_CPU)
def test_every_method_keeps_the_outputs_to_its_precision_at_any_batch_size(method):
    model, args = wide_net(), a_batch(64)
    small = quantized(method, model, args).module()
    with torch.no_grad():
        batch = trial.sized(args, 20)
        expected, found = model(*batch), small(*batch).float()
        assert (found - expected).norm() <= 0.05 * expected.norm()
        for size in (1, 3, 8):
            assert torch.allclose(small(*trial.sized(args, size)).float(), found[:size], atol=0.01 * float(found.std()))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}, "the model itself has changed"


@pytest.mark.parametrize("method", ["int8-weight", "int8-dynamic", "int8-static"])
def test_embeddings_have_a_byte_per_number_and_a_scale_per_row(method):
    torch.manual_seed(0)
    table, index = nn.Embedding(1000, 64), torch.arange(16).view(8, 2)
    with torch.no_grad():
        table.weight[1] *= 100  # its row alone is rounded coarsely
        table.weight[2] = 0
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(128, 4)).eval()
    program = quantized(method, model, (index,))
    assert quantized_share(program) > 0.95
    small = next(each for each in held(program) if each.shape == table.weight.shape)
    assert small.dtype == torch.int8 and int(small[1].abs().max()) == 127 and not small[2].any()
    with torch.no_grad():
        found, expected = program.module()(index), model(index)
    # Activations of a static program have 7 bits on a CPU without VNNI, else 8.
    assert (found - expected).norm() <= (0.04 if method == "int8-static" else 0.03) * expected.norm()
    assert type(model[0]) is nn.Embedding, "the model itself has changed"


@pytest.mark.parametrize("method", ["int8-weight", "int8-dynamic", "int8-static"])
def test_int8_makes_a_model_of_linear_layers_small(method):
    # Large enough for weights to outweigh graph and archive.
    model, args = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval(), a_batch(512)
    plain, about = trial.as_file(model, "none", args, HERE)
    small, noted = trial.as_file(model, method, args, HERE, calibration=[args])
    assert len(small) <= 0.3 * len(plain) and noted["weights_bytes"] <= 0.3 * about["weights_bytes"]
    assert noted["quantized_share"] > 0.98 and about["quantized_share"] == 0


def test_static_int8_quantizes_convolutions_and_drops_their_float32_weights():
    program = quantized("int8-static", ConvNet().eval(), a_batch(3, 8, 8))
    assert quantized_share(program) > 0.9
    assert all(tensor.numel() < 100 for tensor in held(program) if tensor.dtype == torch.float32)


def test_the_file_holds_no_path_of_this_machine():
    content, _ = trial.as_file(wide_net(), "int8-dynamic", a_batch(64), HERE)
    unpacked = content
    with trial.zipfile.ZipFile(trial.io.BytesIO(content)) as archive:
        unpacked = b"".join(map(archive.read, archive.namelist()))
    assert str(Path(torch.__file__).parent).encode() not in unpacked and b"test_quantize" not in unpacked


ALONE = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchao", "speedkit"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from load_model import load
model = load("model.pt2", compiled="compiled" in sys.argv)
inputs, expected = torch.load("expected.pt", weights_only=True)
with torch.no_grad():
    found = model(*inputs)
    if "compiled" not in sys.argv:
        model(*(tensor[:1] for tensor in inputs))
assert not {"torchao", "speedkit"} & set(sys.modules)
print(float((found.float() - expected).norm() / expected.norm()))
"""


def error_when_loaded_alone(folder, model, args, method, *words):
    """Return the error of a file's outputs, relative to those of its float32 model, where there is PyTorch alone."""
    content, _ = trial.as_file(model, method, args, HERE, calibration=[args])
    (folder / "model.pt2").write_bytes(content)
    (folder / "load_model.py").write_text(Path(load.__file__).read_text())
    with torch.no_grad():
        torch.save((args, model(*args)), folder / "expected.pt")
    asked = [sys.executable, "-W", "ignore", "-c", ALONE, *words]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("method", ON_CPU)
def test_the_file_loads_without_speedkit_and_without_torchao(tmp_path, method):
    assert error_when_loaded_alone(tmp_path, wide_net(), a_batch(64), method) < 0.03


@pytest.mark.slow
@pytest.mark.skipif(not HERE.supports("compile"), reason=HERE.why_not("compile") or "it can be compiled")
def test_a_static_file_compiled_where_it_is_loaded_gives_the_same(tmp_path):
    assert error_when_loaded_alone(tmp_path, ConvNet().eval(), a_batch(3, 8, 8), "int8-static", "compiled") < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8-weight", "int8-dynamic", "int8-static"])
def test_a_model_of_clips_of_any_length_stays_one(method):
    work = load_workload("speech", size="tiny", clips=24)
    model = work.model().eval()
    args = trial.inputs_of(model, work, [next(trial.batches(work, work.test, torch.device("cpu")))])[0]
    small = quantized(method, model, args, varies=True).module()
    half = args[0].shape[-1] // 8 * 4
    cut = (args[0][..., :half], args[1].clamp(max=half), args[2][:, : half // 4])
    with torch.no_grad():
        expected = model(*cut)[0]
        assert (small(*cut)[0] - expected).norm() <= 0.1 * expected.norm()


def test_quality_is_compared_item_by_item_and_a_loss_is_positive_in_either_direction():
    work, good = points(**WIDE), wide_net()
    bad = wide_net()
    bad[3].weight.data.neg_()
    bad[3].bias.data.neg_()
    same = trial.quality(work, good, good, torch.device("cpu"))
    assert (same["drop"], same["low"], same["high"], same["n"]) == (0, 0, 0, 32)
    worse, better = (trial.quality(work, *pair, torch.device("cpu")) for pair in ((good, bad), (bad, good)))
    assert worse["drop"] == -better["drop"] and worse["before"] == better["after"] and worse["drop"] != 0
    assert worse["low"] < worse["drop"] < worse["high"]
    lower = trial.quality(dataclasses.replace(work, higher_is_better=False), good, bad, torch.device("cpu"))
    assert lower["drop"] == better["drop"]


# ---- the command ----


@pytest.fixture
def trained(tmp_path):
    work = points()
    fit(work, out=tmp_path / "trained", progress=False)
    return work, tmp_path / "trained"


@pytest.mark.slow
def test_deploy_leaves_model_facts_and_loader(trained, tmp_path):
    work, folder = trained
    words = [
        str(folder),
        "tiny:points",
        "--no-compile",
        "--pairs",
        "4",
        "--batch-size",
        "4",
        "--device",
        "cpu",
        "--max-drop",
        "0.5",
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0 and "test items" in done.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.pt2", "deploy.json", "load_model.py", ".speedkit-run"}
    found = json.loads((tmp_path / "out" / "deploy.json").read_text())
    assert found["size_bytes"] == (tmp_path / "out" / "model.pt2").stat().st_size
    assert {row["batch_size"] for row in found["measurements"]} == {1, 4}
    assert {row["b"] for row in found["measurements"]} == {"int8-dynamic eager"}
    assert "float32 eager" in {row["a"] for row in found["measurements"]}
    before = trial.quality(work, *[read_trained(folder, "tiny:points", {})[1].eval()] * 2, torch.device("cpu"))
    assert found["quality"]["before"] == before["before"]
    model = load.load(tmp_path / "out" / "model.pt2")
    assert model(torch.zeros(5, 8)).shape == (5, 2)


def test_a_larger_drop_than_asked_is_refused_and_nothing_is_written(tmp_path):
    work = points(size=9)
    blind = dataclasses.replace(work, features=without_the_last)
    model = nn.Sequential(nn.Linear(9, 2, bias=False))
    # What decides is lost beside an outlier in the same row, which itself changes nothing.
    model[0].weight.data = torch.cat((torch.tensor([[-0.01], [0.01]]).expand(2, 8), torch.full((2, 1), 1000.0)), 1)
    with pytest.raises(SpeedkitError, match=r"a drop above 0\.01, so no model is written") as raised:
        trial.deploy(blind, model, tmp_path / "out", method="int8-weight", device="cpu", compiled=False, say=str)
    assert raised.value.exit_code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".speedkit-run"}


def without_the_last(waveform):
    return torch.cat((waveform[..., :-1], torch.zeros_like(waveform[..., -1:])), -1)


# ---- what is refused ----


def test_a_quantized_model_is_not_quantized_again():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    by_torchao = wide_net()
    quantize_(by_torchao, Int8WeightOnlyConfig(set_inductor_config=False))
    for model in (by_torchao, quantized("int8-weight").module(), quantized("int8-static").module()):
        with pytest.raises(UsageError, match="quantized already"):
            exported(model, "int8-weight", a_batch(64))


def test_a_method_that_finds_nothing_says_what_it_is_for():
    with pytest.raises(UsageError, match="int8-weight finds nothing to quantize in ConvNet: weights of linear layers"):
        quantized("int8-weight", ConvNet().eval(), a_batch(3, 8, 8))


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UsageError, match=r"needs the package torchao: install it with pip install -e \.\[quant\]"):
        quantized("int8-dynamic")


def test_what_this_machine_cannot_do_is_said_before_anything_is_done(tmp_path):
    assert why_not("int8-dynamic", HERE) == ""
    assert "has its kernels from the compiler, and compile needs a C++ compiler" in why_not(
        "int8-static", dataclasses.replace(HERE, compiler="")
    )
    assert "fp8 needs" in why_not("fp8", HERE) and "take int8-dynamic" in why_not("fp8", HERE)
    on_gpu = dataclasses.replace(HERE, device=torch.device("cuda"), gpu="A GPU", compute_capability=(8, 0))
    assert "int8-static is for x86 CPUs, not for A GPU" in why_not("int8-static", on_gpu)
    assert "Ada with FP8" in why_not("fp8", on_gpu)
    with pytest.raises(UsageError, match=r"there is no method 'int8-dynamc' \(did you mean int8-dynamic"):
        why_not("int8-dynamc", HERE)
    for option, said in (({"max_drop": -0.1}, "take 0 or more"), ({"method": "fp8"}, "fp8 needs")):
        with pytest.raises(UsageError, match=said):
            trial.deploy(points(), points().model(), tmp_path / "out", device="cpu", **option)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["tiny:fewer", "tiny:wider", "audio"])
def test_a_checkpoint_of_something_else_is_refused(trained, monkeypatch, other):
    monkeypatch.setattr(tiny, "fewer", lambda: points(train=95), raising=False)
    monkeypatch.setattr(tiny, "wider", lambda: points(hidden=17), raising=False)
    with pytest.raises(UsageError, match="does not fit: it is of workload points with 96 training items"):
        read_trained(trained[1], other, {"size": "tiny", "clips": 30} if other == "audio" else {})


def test_a_damaged_checkpoint_is_refused(trained, tmp_path):
    whole = (trained[1] / "checkpoint.pt").read_bytes()
    for damaged in (whole[:-100], whole[:300] + bytes([whole[300] ^ 1]) + whole[301:], b""):
        (tmp_path / "damaged.pt").write_bytes(damaged)
        with pytest.raises(SpeedkitError, match=r"damaged.pt cannot be read"):
            read_trained(tmp_path / "damaged.pt", None, {})


def test_a_file_for_other_hardware_says_so_when_it_is_loaded(tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    if not torch.cuda.is_available():
        on_gpu = dataclasses.replace(HERE, device=torch.device("cuda"), gpu="A GPU")
        path.write_bytes(trial.as_file(wide_net(), "none", a_batch(64), on_gpu)[0])
        with pytest.raises(RuntimeError, match=r"no cuda device here, and .* was made on A GPU by none: deploy its"):
            load.load(path)
    monkeypatch.setattr(load, "vnni", lambda: True)
    path.write_bytes(trial.as_file(wide_net(), "int8-static", a_batch(64), HERE, calibration=[a_batch(64)])[0])
    monkeypatch.setattr(load, "vnni", lambda: False)
    with pytest.warns(UserWarning, match="this CPU has no VNNI"):
        load.load(path)
    for content in (path.read_bytes()[:-2000], b"nothing"):
        path.write_bytes(content)
        with pytest.raises(RuntimeError, match="is no model that speedkit deploy wrote"):
            load.load(path)
