"""The command line: what each command leaves, and how a run ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile
import yaml

from speedkit import cli
from speedkit.config import settings_of
from speedkit.plan import Plan
from speedkit.recipe import Recipe

SMALL = ["--size", "tiny", "--batch-size", "8"]


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """Two classes of 24 short tones on disk, in class-named subfolders."""
    root = tmp_path_factory.mktemp("tones")
    rng = np.random.default_rng(0)
    for name, pitch in (("low", 300), ("high", 1500)):
        (root / name).mkdir()
        for index in range(24):
            time_s = np.arange(1600) / 8000
            wave = np.sin(2 * np.pi * pitch * time_s) + rng.normal(0, 0.3, len(time_s))
            soundfile.write(root / name / f"{name}_{index}.wav", (wave / 4).astype(np.float32), 8000)
    return root


@pytest.fixture
def speedkit(capsys, monkeypatch):
    """The command line in this process: words -> (exit code, what it printed, what it complained)."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["speedkit", *map(str, words)])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        signal.signal(signal.SIGTERM, before)
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    return command


def test_train_leaves_history_plan_and_checkpoint(speedkit, recordings, tmp_path):
    out = tmp_path / "run"
    words = ["train", "audio", "--data-dir", recordings, "--out", out, "--steps", "6", "--precision", "fp8", *SMALL]
    code, printed, _ = speedkit(*words)
    assert code == 0 and "accuracy" in printed
    history = json.loads((out / "history.json").read_text())
    assert history["steps"] == 6 and history["evaluation"]["n"] > 0
    assert history["plan_asked"]["precision"] == "fp8"
    [fallback] = [item for item in history["fallbacks"] if item["field"] == "precision"]
    assert fallback["got"] == history["plan_effective"]["precision"] and "FP8" in fallback["why"]
    assert yaml.safe_load((out / "plan.yaml").read_text())["precision"] == fallback["got"]
    assert (out / "checkpoint.pt").exists()
    code, _, complaint = speedkit(*words)
    assert code == 2 and "already holds a train run" in complaint and "--resume" in complaint


def test_unreadable_recordings_are_quarantined_by_name(speedkit, recordings, tmp_path):
    files, out = shutil.copytree(recordings, tmp_path / "files"), tmp_path / "run"
    (files / "low" / "broken.wav").write_bytes(b"RIFF not a recording")
    words = ["train", "audio", "--data-dir", files, "--steps", "2", *SMALL]
    assert speedkit(*words, "--out", out)[0] == 0
    assert "broken.wav" in (out / "quarantine.csv").read_text()
    for index in range(6):
        (files / "low" / f"broken_{index}.wav").write_bytes(b"")
    code, _, complaint = speedkit(*words, "--out", tmp_path / "other")
    assert code == 1 and "%" in complaint


@pytest.mark.slow
def test_hardware_shows_facts_reasons_and_measured_ceilings(speedkit):
    code, printed, _ = speedkit("hardware", "--device", "cpu")
    card = yaml.safe_load(printed)
    assert code == 0 and "CUDA GPU" in card["cannot"]["cuda_graphs"]
    assert "FLOP/s (median" in card["ceilings"]["matmul_fp32"]
    code, printed, _ = speedkit("hardware", "--device", "cpu", "--json")
    facts = json.loads(printed)
    assert code == 0 and facts["ram_bytes"] == card["ram_bytes"] and facts["ceilings"]["memcpy"]["value"] > 0


def test_every_field_has_an_option_with_its_help(speedkit):
    code, printed, _ = speedkit("train", "--help")
    assert code == 0
    text = " ".join(printed.split())
    for setting in (*settings_of(Recipe).values(), *settings_of(Plan).values()):
        assert "--" + setting.name.replace("_", "-") in text and setting.help.split("[")[0].rstrip(". ") in text


def test_plan_file_and_typed_fields_come_together(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("cache: ram\nlog_every: 7\n")
    typed = {"log_every": "9", "channels_last": True, "workers": None}
    assert cli.find_plan(str(path), typed) == Plan(cache="ram", log_every=9, channels_last=True)


def test_compare_gates_on_a_slower_first_plan(speedkit, recordings, tmp_path):
    fast = tmp_path / "fast.yaml"
    fast.write_text("cache: ram\n")
    small = ["audio", "--data-dir", recordings, "--pairs", "8", *SMALL]
    code, printed, _ = speedkit("compare", "baseline", fast, *small, "--json")
    measured = json.loads(printed)
    assert (
        code == (1 if measured["decision"] == "faster" else 0)
        and len(measured["seconds_a"]) == len(measured["seconds_b"]) == 8
    )


def test_the_doctor_leaves_its_ledger(speedkit, recordings, tmp_path):
    out = tmp_path / "seen"
    words = ["doctor", "audio", "--data-dir", recordings, "--out", out, "--budget", "1s", *SMALL]
    code, printed, _ = speedkit(*words)
    ledger = json.loads((out / "ledger.json").read_text())
    assert code == 0 and "data wait" in printed and str(out) in printed
    assert sum(row["share"] for row in ledger["rows"]) == pytest.approx(1)
    assert {"cause", "seconds", "share", "ceiling_speedup"} <= ledger["rows"][0].keys()
    assert "roofline left out: the budget of 1 s was spent" in ledger["notes"]
    other = [*words[:4], "--out", tmp_path / "other", *SMALL]
    code, _, complaint = speedkit(*other, "--trace", tmp_path / "missing" / "trace.json")
    assert code == 2 and "the trace cannot be written to" in complaint


def test_a_cache_is_built_before_training(speedkit, recordings, tmp_path):
    folder = tmp_path / "cache"
    words = ["cache", "build", folder, "--data-dir", recordings, "--size", "tiny", "--dtype", "float16"]
    assert speedkit(*words)[0] == 0 and list(folder.iterdir())


def test_a_damaged_cache_is_described_found_and_repaired(speedkit, recordings, tmp_path):
    folder = tmp_path / "cache"
    assert speedkit("cache", "build", folder, "--data-dir", recordings, "--size", "tiny")[0] == 0
    code, printed, _ = speedkit("cache", "info", folder)
    assert code == 0 and "audio" in printed and "48" in printed
    assert speedkit("cache", "verify", folder)[0] == 0
    largest = max(folder.rglob("*.*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    code, printed, _ = speedkit("cache", "verify", folder)
    assert code == 1 and ": entry " in printed
    code, printed, _ = speedkit("cache", "repair", folder)
    assert code == 0 and printed.startswith("1 ") and speedkit("cache", "verify", folder)[0] == 0


def test_an_unexpected_failure_is_one_sentence_and_a_traceback_only_with_debug(speedkit, monkeypatch):
    def broken(*_):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(cli, "this_machine", broken)
    code, _, complaint = speedkit("hardware")
    assert code == 1 and complaint == "speedkit: RuntimeError: first line second line (--debug shows where)\n"
    for words in (["hardware", "--debug"], ["--debug", "hardware"]):
        monkeypatch.setattr(sys, "argv", ["speedkit", *words])
        with pytest.raises(RuntimeError):
            cli.main()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_a_checkpoint_and_goes_on_from_it(recordings, tmp_path, number, code):
    out, whole = tmp_path / "run", tmp_path / "whole"
    train = [sys.executable, "-m", "speedkit", "train", "audio", "--data-dir", str(recordings), *SMALL]
    train += ["--epochs", "2", "--workers", "1", "--log-every", "1", "--out"]
    straight = subprocess.run([*train, str(whole)], capture_output=True, text=True, check=True)
    assert "Traceback" not in straight.stderr
    process = subprocess.Popen(
        [*train, str(out), "--validate-every", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (out / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.01)  # until the first evaluation has been passed: there is something to interrupt
    os.kill(process.pid, number)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == code, complaint
    assert "Traceback" not in complaint and "--resume" in complaint
    assert json.loads((out / "history.json").read_text())["steps"] < 10
    subprocess.run([*train, str(out), "--resume"], capture_output=True, check=True)
    resumed, straight = (json.loads((folder / "history.json").read_text()) for folder in (out, whole))
    assert resumed["resumed_from"] and resumed["loss"] == straight["loss"]
    assert resumed["evaluation"] == straight["evaluation"]


@pytest.mark.slow
def test_climb_on_real_files_leaves_plan_record_notebook_and_report(recordings, tmp_path):
    out, files, trained = tmp_path / "climb", shutil.copytree(recordings, tmp_path / "files"), tmp_path / "trained"
    (files / "low" / "cut_short.wav").write_bytes(b"RIFF")
    climb = [sys.executable, "-m", "speedkit", "climb", "audio", "--data-dir", str(files), "--out", str(out), *SMALL]
    climb += ["--epochs", "2", "--seeds", "2", "--rungs", "cache,host_syncs", "--budget", "4m"]
    done = subprocess.run(climb, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "files left out: 1 (" in done.stdout and "cut_short.wav" in (out / "quarantine.csv").read_text()
    for name in ("plan.yaml", "record.json", "climb.ipynb", "report.html"):
        assert (out / name).stat().st_size > 100, done.stderr
    record = json.loads((out / "record.json").read_text())
    assert {row["rung"] for row in record["rungs"]} == {"cache", "host_syncs"}
    assert all(row["low"] > 1 for row in record["rungs"] if row["kept"])
    assert record["speedup"]["low"] <= record["speedup"]["ratio"] <= record["speedup"]["high"]
    train = [sys.executable, "-m", "speedkit", "train", "audio", "--data-dir", str(recordings), "--steps", "2", *SMALL]
    subprocess.run([*train, "--plan", str(out / "plan.yaml"), "--out", str(trained)], capture_output=True, check=True)
    assert json.loads((trained / "history.json").read_text())["plan_asked"] == record["plan"]
    resumed = subprocess.run([*climb, "--resume", "--no-notebook"], capture_output=True, text=True)
    assert json.loads((out / "record.json").read_text())["rungs"] == record["rungs"], resumed.stderr
