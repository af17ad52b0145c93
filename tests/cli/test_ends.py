"""How a run with worker processes ends when something ends it: one sentence, the exit code, and no process left."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from processes import ROOT, TESTS

FAULTY = """
import itertools, os, signal
from tiny import calling, points
calls = itertools.count(1)

def fault(model, batch):
    if next(calls) == 3:
        {fault}

def workload():
    return calling(points(train=1600), fault)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("os.killpg(os.getpid(), signal.SIGINT)", 130, "stopped by SIG"),
        ("os.killpg(os.getpid(), signal.SIGHUP)", 129, "stopped by SIGHUP after step 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
    ids=["ctrl-c", "hang-up", "killed"],
)
def test_a_run_ends_with_one_sentence_and_leaves_no_process(fault, code, words, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY.format(fault=fault))
    process = subprocess.Popen(
        [sys.executable, "-m", "speedkit", "train", "faulty:workload", "--workers", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"},
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


HANG_UP = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); from speedkit.cli import main; main()"


@pytest.mark.parametrize("gone", ["pipe", "disk", "nohup"])
def test_a_training_goes_on_without_its_output_and_under_nohup(gone, tmp_path):
    start = ["nohup", sys.executable, "-c", HANG_UP] if gone == "nohup" else [sys.executable, "-m", "speedkit"]
    command = [*start, "train", "tiny:points", "--log-every", "1", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
    output = open("/dev/full", "w") if gone == "disk" else subprocess.PIPE  # noqa: SIM115
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True)
    if gone == "pipe":
        process.stdout.close()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "speedkit:" not in errors, errors
    assert (tmp_path / "out" / "history.json").exists()


def test_ctrl_c_during_the_imports_is_one_sentence(tmp_path):
    (tmp_path / "yaml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "speedkit", "hardware"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 130 and ended.stderr.count("\n") == 1 and "stopped by SIGINT" in ended.stderr


def in_group(process, group):
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) == group
