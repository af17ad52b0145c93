"""`speedkit dry-run`: what it counts is what PyTorch allocates, and what it predicts is as near as its table says."""

import math
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import ROOT
from torch.utils.data import TensorDataset

from speedkit import dry_run, load_workload
from speedkit.dry import predict
from speedkit.dry.dry_run import dry_runs
from speedkit.dry.gpus import GPUS, chosen_gpus, find_gpu
from speedkit.dry.process import run
from speedkit.errors import UsageError
from speedkit.files import read_json
from speedkit.own_workload import from_dataset
from speedkit.plan import Plan
from speedkit.recipe import Recipe

sys.path.insert(0, str(ROOT / "benchmarks"))
import published

HIDDEN = 4096
CHANNELS = 128
WEIGHTS = 4 * (1024 * HIDDEN + HIDDEN + HIDDEN * 10 + 10)  # bytes
CASES = {published.name_of(case): case for case in published.cases()}
QUICK = "rasbt norms of PyTorch on A100-40"
SLOW = ("timm resnet18 on RTX3090", "Lambda BERT-base tf32 on RTX4090")  # all are: python benchmarks/published.py all


@pytest.fixture(autouse=True)
def functions_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def perceptron():
    return torch.nn.Sequential(torch.nn.Linear(1024, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10))


def images():
    data = TensorDataset(torch.zeros(64, 1024), torch.zeros(64, dtype=torch.long))
    return from_dataset(perceptron, data, data, recipe=Recipe(batch_size=64, epochs=2), name="perceptron")


class Scores(torch.nn.Linear):
    """A model that takes the entries of its batch by name."""

    def forward(self, features):
        return super().forward(features)


def with_a_batch():
    return Scores(1024, HIDDEN), {"features": torch.zeros(4, 1024)}


def recordings():
    """Sequences of 800 to 2,000 numbers, all lengths multiples of 400."""
    data = [(torch.zeros(1, 400 * (2 + number % 4)), number % 10) for number in range(64)]
    net = [
        torch.nn.Conv1d(1, CHANNELS, 1),
        torch.nn.AdaptiveAvgPool1d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(CHANNELS, 10),
    ]
    recipe = Recipe(batch_size=64, epochs=2)
    return from_dataset(torch.nn.Sequential(*net), data, data, recipe=recipe, name="recordings", length=length_of)


def length_of(sample):
    return sample.data[sample.index][0].shape[-1]


def counts(launches=10, **others):
    """What a step asks for that multiplies for 1e12 FLOP and moves 1e9 bytes beside."""
    moved = {"mm": 0, "add": int(8e8), "_foreach_add": int(2e8)}
    found = {"flops": {"mm": int(1e12)}, "moved_bytes": moved, "number_format": "bf16", "launches": launches}
    return found | {"outside_bytes": {"mm": 0, "_foreach_add": int(2e8)}} | others


# ---- what is counted ----


@pytest.mark.slow
def test_memory_by_kind_is_that_of_the_weights_and_a_smaller_gpu_takes_smaller_batches():
    small = GPUS["T4"]._replace(mib=1024)  # of which CUDA itself takes 550
    found = {gpu.mib: dry_run(images(), "careful", gpu) for gpu in (GPUS["T4"], small)}
    for row in found.values():
        memory = row["memory"]
        assert (memory["weights"], memory["gradients"]) == (WEIGHTS, WEIGHTS)
        assert 2 * WEIGHTS <= memory["optimizer"] < 2.01 * WEIGHTS
        assert memory["peak"] <= memory["reserved"] and memory["activations"] > 64 * HIDDEN * 4
    sizes = [row["largest_micro_batch"] for row in found.values()]
    assert 64 < sizes[1] < sizes[0]
    assert sizes[1] * HIDDEN * 4 < (1024 - 550) * 2**20 - 4 * WEIGHTS
    assert row["number_format"] == "fp32"  # a T4 has no tf32, which the careful plan asks for
    assert sum(row["flops"].values()) == 2 * 64 * (2 * 1024 * HIDDEN + 3 * HIDDEN * 10)  # none for the inputs


@pytest.mark.slow
def test_longer_samples_fit_in_smaller_batches_and_as_many_workers_load_as_a_step_takes(monkeypatch):
    monkeypatch.setattr("speedkit.measure.loading.timed", lambda items, _device, count: items() and [160.0] * count)
    row = dry_run(recordings(), "baseline", GPUS["T4"]._replace(mib=2048))
    assert row["micro_batch"] == 64 and row["largest_length"] > 2000 and row["largest_length"] % 400 == 0
    most = 64 * row["largest_length"]  # numbers at once
    assert most == pytest.approx(row["largest_micro_batch"] * 2000, rel=0.1)
    assert 0.25 < 4 * CHANNELS * most / ((2048 - 550) * 2**20) < 1
    assert row["sample_s"] == 10 and row["workers"] == math.ceil(64 * 10 / row["seconds"])
    half = dry_run(recordings(), Plan(micro_batch=32), GPUS["T4"]._replace(mib=2048))
    assert half["micro_batch"] == 32 and 32 * half["largest_length"] == pytest.approx(most, rel=0.1)


@pytest.mark.slow
def test_of_a_model_with_a_sample_batch_the_largest_batch_that_fits_is_found():
    found = dry_run(load_workload("test_dry_run:with_a_batch"), "careful", "T4")
    assert found["micro_batch"] == 4 < found["largest_micro_batch"] and found["memory"]["weights"] == 4 * 1025 * HIDDEN


@pytest.mark.slow
def test_what_does_not_fit_is_one_sentence_and_other_gpus_are_tried():
    told = []
    tiny = GPUS["T4"]._replace(mib=600, name="a tiny GPU")
    with pytest.raises(UsageError, match="perceptron runs on none of these GPUs"):
        dry_runs("perceptron", partial(dry_run, images()), ["baseline"], gpus=[tiny], tell=told.append)
    assert [re.search("perceptron does not fit on a tiny GPU", sentence) is not None for sentence in told] == [True]


@pytest.mark.slow
def test_the_command_leaves_a_page_and_tells_of_memory_and_time(speedkit, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    out = tmp_path / "out"
    code, printed, _ = speedkit("dry-run", "test_dry_run:images", "--gpu", "T4", "--plan", "careful", "--out", out)
    assert code == 0 and "predicted, typical error" in printed and "micro-batch that fits" in printed
    rows = read_json(out / "dry-run.json")
    assert [row["plan"] for row in rows] == ["baseline", "careful"]
    assert rows[0]["launches"] > rows[1]["launches"]  # of an optimizer that is not fused
    assert (out / "dry-run.html").read_text().count("<rect") == 2 * 4 + 2 * 2 * 5  # the keys, and the bars


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpu", "h10"], r"no GPU 'h10' \(did you mean h100\?\): take T4, .*--sm, --memory"),
        (["--sm", "89", "--memory", "16"], "give all four"),
        (["--gpu", "T4", "--plan", "quick"], "no plan 'quick'"),
        (["more"], "'more' is one argument too many: only a script"),
    ],
)
def test_what_is_not_known_is_one_sentence(speedkit, words, sentence):
    code, _, error = speedkit("dry-run", "test_dry_run:images", *words)
    assert code == 2 and re.search(sentence, error) and len(error.splitlines()) == 1


def in_a_notebook():
    """A workload whose model is defined in no module."""
    nested = images()
    object.__setattr__(nested, "model", lambda: torch.nn.Linear(1024, 10))
    return nested


@pytest.mark.slow
def test_a_model_of_a_notebook_is_handed_over_or_is_one_sentence(monkeypatch):
    assert dry_run(in_a_notebook(), "baseline", "T4")["memory"]["weights"] == 4 * (1024 * 10 + 10)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match="perceptron cannot be handed to another process: install cloudpickle"):
        dry_run(in_a_notebook(), "baseline", "T4")


# ---- a script ----

BESIDE = (
    "from torch import nn\n\ndef net(units):\n    return nn.Sequential(nn.Linear(64, units), nn.Linear(units, 10))\n"
)
SCRIPT = """
import sys
import torch
from beside import net

torch.set_float32_matmul_precision("high")
model = net(int(sys.argv[1])).to(sys.argv[3])
optimizer = torch.optim.AdamW(model.parameters())
called = torch.compile(model, backend="eager") if "--compile" in sys.argv else model
for _ in range(int(sys.argv[2])):
    loss = called(torch.zeros(32, 64, device=sys.argv[3])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
open("ended", "w")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


@pytest.mark.slow
def test_a_script_that_nobody_edits_runs_until_a_step_was_counted(speedkit, script, tmp_path):
    code, printed, _ = speedkit("dry-run", "--gpu", "A100-40", "--out", "out", script, "4096", "1000", "cuda")
    assert code == 0 and "train.py, plan of the script" in printed
    [row] = read_json(tmp_path / "out" / "dry-run.json")
    weights = 4 * (64 * 4096 + 4096 + 4096 * 10 + 10)
    assert (row["memory"]["weights"], row["memory"]["gradients"]) == (weights, weights)
    assert 2 * weights <= row["memory"]["optimizer"] < 2.01 * weights
    assert sum(row["flops"].values()) == 2 * 32 * (2 * 64 * 4096 + 3 * 4096 * 10)  # none for the inputs
    assert row["number_format"] == "tf32" and row["waits"] == 1 and row["launches"] > 10
    assert not (tmp_path / "ended").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["16", "3", "cuda"],
            "then it failed: it made 3 optimizer steps, too few to count one: it takes 4",
        ),
        (["16", "9", "cpu"], "it computes nothing on the GPU"),
        (["16", "9", "cuda", "--compile"], "it compiles its model: TORCHDYNAMO_DISABLE=1"),
        (["100000000", "9", "cuda"], "train.py runs on none of these GPUs"),
    ],
)
def test_what_cannot_be_counted_of_a_script_is_one_sentence(speedkit, script, arguments, sentence):
    code, _, error = speedkit("dry-run", "--gpu", "T4", script, *arguments)
    assert code and sentence in error and "Traceback" not in error


# ---- what is predicted ----


def test_a_step_takes_as_long_as_its_products_and_its_bytes():
    h100 = GPUS["H100"]
    kinds = predict.seconds_by_kind(counts(), h100)
    assert kinds["products"] == pytest.approx(1e12 / (predict.PRODUCTS * 989e12))
    assert kinds["other kernels"] == pytest.approx(8e8 / (predict.BANDWIDTH * h100.bandwidth))
    assert kinds["optimizer"] == pytest.approx(kinds["other kernels"] / 4)
    compiled = predict.seconds_by_kind(counts(fused_bytes=int(4e8)), h100)
    assert compiled == kinds | {"other kernels": pytest.approx(kinds["other kernels"] / 2)}
    assert find_gpu("v100").tflops == (("fp32", 15.7), ("fp16", 125.0))  # no tf32, no bf16
    assert predict.seconds_by_kind(counts() | {"number_format": "tf32"}, GPUS["T4"])["products"] > 0.1


def test_a_launch_bound_step_is_called_that_and_no_time_is_predicted():
    found = predict.prediction(counts(launches=10_000), GPUS["H100"])
    assert found["launch_bound"] and found["seconds"] is None and found["range_s"] is None
    found = predict.prediction(counts(), GPUS["H100"])
    low, high = found["range_s"]
    assert not found["launch_bound"] and low < found["seconds"] < high
    assert high / low == pytest.approx(found["typical_error"] ** 2)


def test_a_gpu_of_ones_own_is_described_by_four_numbers():
    [own] = chosen_gpus([], {"sm": 89.0, "memory": 24.0, "bandwidth": 1008.0, "tflops": 165.0})
    assert own.bandwidth == pytest.approx(1008e9, rel=1e-5) and own.mib == int(24e9 / 2**20)
    assert dict(own.tflops)["tf32"] == 82.5 and own.capability == 89


def test_each_gpu_has_a_source_and_the_bandwidth_of_its_data_sheet():
    gb_s = {"T4": 320, "V100": 900, "RTX3090": 936, "A100-40": 1555, "A100-80": 2039, "RTX4090": 1008, "L4": 300}
    gb_s |= {"L40S": 864, "H100": 3350, "H200": 4800, "B200": 8000, "V100-16": 900}
    assert {key: round(gpu.bandwidth / 1e9) for key, gpu in GPUS.items()} == pytest.approx(gb_s, rel=0.003)
    assert all(len(line.split(",")) == 13 for line in (ROOT / "speedkit/dry/gpus.csv").read_text().splitlines())


# ---- how near ----


def test_the_table_of_errors_is_that_of_the_counts():
    page = (ROOT / "docs" / "dry-run.md").read_text()
    assert published.table() in page, "run benchmarks/published.py"
    of_models = [line for line in page.splitlines() if " | old | " in line or " | new | " in line]
    assert len(of_models) > 10 and {*of_models} <= {*published.each_case().splitlines()}
    new = published.ratios("new")
    kinds = {"eager": "step, eager", "compiled": "step, compiled", "memory": "memory", "gain": "one optimization"}
    found = {kind: round(published.mean_factor(new[what].values()), 2) for kind, what in kinds.items()}
    assert found == predict.ERRORS
    assert published.mean_factor(published.ratios("old")["memory"].values()) < 1.02


def test_half_of_the_new_cases_are_on_gpus_of_today_and_no_case_is_left_out():
    new = [case for case in CASES.values() if case["set"] == "new"]
    assert len(new) >= 15 and {"H100", "RTX4090", "T4"} <= {case["gpu"] for case in new}
    assert {*read_json(published.COUNTS)} == {*CASES}


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_case_asks_of_its_gpu_what_it_did_when_it_was_counted(name, tmp_path):
    path = tmp_path / "counts.json"
    run("published:count", GPUS[CASES[name]["gpu"]], timeout_s=1800, names=[name], path=path)
    now, then = read_json(path)[name], read_json(published.COUNTS)[name]
    assert (now["flops"], now["launches"]) == (then["flops"], then["launches"])
    assert now["memory"]["reserved"] == pytest.approx(then["memory"]["reserved"], rel=0.03)
