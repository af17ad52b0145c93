"""The command line: what each command leaves, and how a run ends."""

import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest
import torch
import yaml
from processes import ROOT, python
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.utils.data import DataLoader, TensorDataset

import speedkit as package
from speedkit.lab.notebooks import find_notebooks
from speedkit.machine import cache_root
from speedkit.plan import Plan

SMALL = ["--size", "tiny", "--batch-size", "8"]


def read(path):
    return json.loads(path.read_text())


def test_train_leaves_its_results_and_names_what_it_left_out(speedkit, recordings, tmp_path):
    files, out = shutil.copytree(recordings, tmp_path / "files"), tmp_path / "run"
    (files / "low" / "broken.wav").write_bytes(b"RIFF not a recording")
    (tmp_path / "asked.yaml").write_text("log_every: 7\nprecision: fp8\nfused_optimizer: true\n")
    words = ["train", "audio", "--data-dir", files, "--steps", "6", "--plan", tmp_path / "asked.yaml", *SMALL]
    code, printed, _ = speedkit(*words, "--out", out, "--log-every", "3", "--channels-last")
    assert code == 0 and "accuracy" in printed and "broken.wav" in (out / "quarantine.csv").read_text()
    history = read(out / "history.json")
    assert history["steps"] == 6 and history["evaluation"]["n"] > 0
    assert history["plan_asked"] == vars(Plan(precision="fp8", log_every=3, channels_last=True, fused_optimizer=True))
    [fallback] = [row for row in history["fallbacks"] if row["field"] == "precision"]
    assert fallback["got"] == history["plan_effective"]["precision"] and "FP8" in fallback["why"]
    assert yaml.safe_load((out / "plan.yaml").read_text())["precision"] == fallback["got"]
    assert (out / "checkpoint.pt").exists()


@pytest.mark.slow
def test_hardware_shows_facts_reasons_and_measured_peaks(speedkit):
    card = yaml.safe_load(speedkit("hardware", "--device", "cpu")[1])
    assert "CUDA GPU" in card["cannot"]["cuda_graphs"] and "FLOP/s (median" in card["peaks"]["matmul_fp32"]
    facts = json.loads(speedkit("hardware", "--device", "cpu", "--json")[1])
    assert facts["ram_bytes"] == card["ram_bytes"] and facts["peaks"]["memory_bandwidth"]["value"] > 0


def test_compiled_code_is_kept_between_runs_and_cold_where_that_is_measured(speedkit, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "here")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    speedkit("--version")
    assert cache_dir() == str(cache_root() / "inductor")
    with fresh_cache():
        assert cache_dir() != str(cache_root() / "inductor")


def test_compare_gates_on_a_slower_first_plan(speedkit, recordings):
    words = ["compare", "baseline", "careful", "audio", "--data-dir", recordings, "--pairs", "4", "--json"]
    code, printed, complaint = speedkit(*words, *SMALL, "--device", "cpu")
    measured = json.loads(printed)
    assert code == (measured["decision"] == "faster") and "careful: precision: asked tf32" in complaint
    assert len(measured["seconds_a"]) == len(measured["seconds_b"]) == 4


def test_the_profile_leaves_its_breakdown(speedkit, recordings, tmp_path):
    out = tmp_path / "seen"
    code, printed, _ = speedkit("profile", "audio", "--data-dir", recordings, *SMALL, "--out", out)
    assert code == 0 and "data wait" in printed and str(out) in printed
    assert {"cause", "seconds", "share", "speedup_without"} <= read(out / "breakdown.json")["rows"][0].keys()


@pytest.mark.slow
def test_the_profile_looks_at_a_model_and_a_batch(speedkit, tmp_path, monkeypatch):
    (tmp_path / "sampled.py").write_text(
        "import torch\n"
        "def named(): return torch.nn.Linear(8, 4), {'input': torch.randn(2, 8)}\n"
        "def listed(): return torch.nn.Bilinear(8, 8, 4), (torch.randn(2, 8), torch.randn(2, 8))\n"
        "def frozen(): return torch.nn.Linear(8, 4).requires_grad_(False), torch.randn(2, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, title in (("named", "Linear"), ("listed", "Bilinear")):
        code, printed, _ = speedkit("profile", f"sampled:{name}", "--device", "cpu", "--out", name)
        assert code == 0 and printed.startswith(f"{title}:\n") and "backward" in printed, printed
    assert read(tmp_path / "named" / "breakdown.json")["roofline"]["flops_per_step"] == 2 * (2 * 2 * 8 * 4)
    assert "Linear returns no tensor that" in speedkit("profile", "sampled:frozen", "--device", "cpu")[2]


def test_what_stands_before_a_script_is_ours_and_what_stands_behind_it_the_script_s(speedkit, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import sys; print('arguments', sys.argv[1:]); sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    code, printed, _ = speedkit("profile", "--out", "seen", "train.py", "--help", "--lr", "1", "--out", "x")
    assert code == 3 and printed == "arguments ['--help', '--lr', '1', '--out', 'x']\n"


def test_a_cache_is_built_for_a_plan_described_and_repaired(speedkit, recordings, tmp_path):
    folder = tmp_path / "cache"
    (tmp_path / "plan.yaml").write_text("cache_dtype: float16\n")
    build = ["cache", "build", folder, "--data-dir", recordings, "--size", "tiny", "--plan", tmp_path / "plan.yaml"]
    assert speedkit(*build)[0] == speedkit("cache", "verify", folder)[0] == 0
    assert "48 of 48 entries" in speedkit("cache", "info", folder)[1]
    largest = max(folder.rglob("*.*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    code, printed, _ = speedkit("cache", "verify", folder)
    assert code == 1 and ": entry " in printed
    assert speedkit("cache", "repair", folder)[1].startswith("1 ") and speedkit("cache", "verify", folder)[0] == 0


def test_an_unexpected_failure_is_one_sentence_and_a_traceback_only_with_debug(speedkit, monkeypatch):
    def broken(*_):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("speedkit.cli.measuring.this_machine", broken)
    code, _, complaint = speedkit("hardware")
    assert code == 1 and "RuntimeError: first line second line" in complaint and complaint.count("\n") == 1
    with pytest.raises(RuntimeError):
        speedkit("hardware", "--debug")


class BigramModel(torch.nn.Module):
    """A language model that takes its batch by keywords and returns an object with the loss."""

    def __init__(self, vocabulary):
        super().__init__()
        self.logits = torch.nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens, labels):
        loss = torch.nn.functional.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)


CATCHES_ALL = """
import os, signal
from tiny import points

try:
    os.kill(os.getpid(), signal.SIGTERM)
except:  # as mpmath has it, which torch imports while a training is set up
    pass
"""


@pytest.mark.slow
def test_a_stop_during_an_import_that_catches_whatever_is_raised_ends_the_run(tmp_path):
    (tmp_path / "catching.py").write_text(CATCHES_ALL)
    ended = python("-m", "speedkit", "train", "catching:points", "--out", "run", folder=tmp_path)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert ended.stderr == "speedkit: stopped by SIGTERM; what was complete is kept\n"


@pytest.mark.slow
def test_the_readme_s_lines_of_python_run(recordings, tmp_path, monkeypatch):
    (tmp_path / "clips").symlink_to(recordings)
    monkeypatch.chdir(tmp_path)
    quick = functools.partial(package.tune, optimizations=("host_syncs",), pairs=10, seeds=2, progress=False)
    monkeypatch.setattr(package, "tune", quick)  # the whole table of optimizations takes minutes
    model = torch.nn.Linear(8, 2)
    train_set, test_set = (TensorDataset(torch.randn(count, 8), torch.arange(count) % 2) for count in (64, 32))
    loader, optimizer = DataLoader(train_set, 8), torch.optim.SGD(model.parameters(), 0.1)

    def train_as_ever():
        for inputs, targets in loader:
            step((inputs, targets))
            optimizer.step()

    def step(batch):
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()

    def collator(texts):
        return {"tokens": torch.stack(texts), "labels": torch.stack(texts)}

    texts = list(torch.randint(16, (64, 8)))
    names = locals() | {
        "GPT2LMHeadModel": BigramModel,
        "config": 16,
        "test_loader": DataLoader(texts[:16], 8, collate_fn=collator),
        "batch_of": lambda size: (torch.randn(size, 8), torch.arange(size) % 2),
        "DataLoader": DataLoader,
        "Plan": Plan,
        "loss": torch.nn.functional.cross_entropy,
        "inputs": torch.randn(8, 8),
        "targets": torch.arange(8) % 2,
        "speedkit": package,
    }
    for page in ("README.md", "docs/your-own.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        for block in blocks:
            exec(block, dict(names))  # each by itself
        assert blocks, page
    assert {path.parent.name for path in tmp_path.glob("runs/*/record.json")} == {"mine", "texts"}


@pytest.mark.slow
def test_tuning_on_real_files_leaves_plan_record_notebook_and_report(speedkit, recordings, tmp_path):
    out, files, trained = tmp_path / "tune", shutil.copytree(recordings, tmp_path / "files"), tmp_path / "trained"
    (files / "low" / "cut_short.wav").write_bytes(b"RIFF")
    tune = ["tune", "audio", "--data-dir", files, "--out", out, *SMALL, "--epochs", "2", "--seeds", "2"]
    tune += ["--optimizations", "cache,host_syncs", "--budget", "4m"]
    assert "Files left out: 1 (" in speedkit(*tune)[1] and "cut_short.wav" in (out / "quarantine.csv").read_text()
    assert all((out / name).stat().st_size > 100 for name in ("plan.yaml", "tune.ipynb", "report.html"))
    page = (out / "report.html").read_text()
    assert f"<code>speedkit tune audio --data-dir {files}" in page  # as it was typed
    assert f"speedkit train audio --data-dir {files} --size" in page or "plain PyTorch stays" in page
    record = read(out / "record.json")
    assert {row["optimization"] for row in record["optimizations"]} == {"cache", "host_syncs"}
    train = ["train", "audio", "--data-dir", recordings, "--steps", "2", *SMALL, "--out", trained]
    assert speedkit(*train, "--plan", out / "plan.yaml")[0] == 0
    assert read(trained / "history.json")["plan_asked"] == record["plan"]
    assert speedkit(*tune, "--resume", "--no-notebook")[0] == 0
    assert read(out / "record.json")["optimizations"] == record["optimizations"]


@pytest.mark.slow
def test_lab_opens_a_working_copy_and_leaves_what_is_there(tmp_path):
    """JupyterLab itself, told to say its version only."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "21_mixed_precision.ipynb").write_text("my own work")
    command = [sys.executable, "-m", "speedkit", "lab", "mine", "--", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lessons = {path.name for path in find_notebooks()}
    assert done.returncode == 0 and re.match(r"\d+\.\d+", done.stdout), done
    assert {path.name for path in (tmp_path / "mine").iterdir()} == lessons and len(lessons) > 20
    assert (tmp_path / "mine" / "21_mixed_precision.ipynb").read_text() == "my own work"
