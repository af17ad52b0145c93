"""How a run with worker processes ends when something ends it: one sentence, the exit code, and no process left."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTY = """
import dataclasses, itertools, multiprocessing, os, signal, sys
sys.path.insert(0, {tests!r})
import tiny
from speedkit.data import batches
batches.CHECK_S, batches.HUNG_S = 0.5, 2.0
calls = itertools.count(1)

def loss(model, batch, recipe):
    if next(calls) == 3:
        pids = [process.pid for process in multiprocessing.active_children()]
        {fault}
    return tiny.loss(model, batch, recipe)

def workload():
    return dataclasses.replace(tiny.points(train=1600), loss=loss)
"""
# What goes wrong, options, the exit code, and words of the one line of stderr.
RUNS = {
    "stopped": ("[os.kill(pid, signal.SIGSTOP) for pid in pids]", ["--persistent-workers"], 1, "hangs"),
    "ctrl-c": ("os.killpg(os.getpid(), signal.SIGINT)", [], 130, "stopped by SIG"),
    "hang-up": ("os.killpg(os.getpid(), signal.SIGHUP)", [], 129, "stopped by SIGHUP after step 3"),
    "killed itself": ("os.kill(os.getpid(), signal.SIGKILL)", [], -9, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_with_one_sentence_and_leaves_no_process(name, tmp_path):
    fault, options, code, words = RUNS[name]
    (tmp_path / "faulty.py").write_text(FAULTY.format(tests=str(ROOT / "tests"), fault=fault))
    command = [sys.executable, "-m", "speedkit", "train", "faulty:workload", "--workers", "2", *options]
    process = subprocess.Popen(
        [*command, "--out", tmp_path / "out"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, errors = process.communicate(timeout=60)  # until the workers have closed stderr, too
    assert process.returncode == code and words in errors, errors
    assert errors.count("\n") == 1 or code == -signal.SIGKILL, errors  # its workers may say that their pipe broke
    group = [child for child in psutil.process_iter() if in_group(child, process.pid)]
    assert psutil.wait_procs(group, timeout=10)[1] == []


TRAIN = [sys.executable, "-m", "speedkit", "train", "tiny:points", "--log-every", "1"]


@pytest.mark.parametrize("gone", ["pipe", "disk", "nohup"])
def test_a_training_goes_on_without_its_output_and_under_nohup(gone, tmp_path):
    command = [*TRAIN, "--out", str(tmp_path / "out")]
    if gone == "nohup":
        command = ["nohup", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"]
        command = [*command[:3], f"{command[3]}; import sys; from speedkit.cli import main; main()"]
        command += [*TRAIN[3:], "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    output = open("/dev/full", "w") if gone == "disk" else subprocess.PIPE  # noqa: SIM115
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True)
    if gone == "pipe":
        process.stdout.close()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "speedkit:" not in errors, errors
    assert (tmp_path / "out" / "history.json").exists()


def in_group(process, group):
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) == group
