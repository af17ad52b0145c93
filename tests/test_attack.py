"""The attack from outside: processes that are killed, stopped or lose their output, and hostile input.

Each group says how many of its tries held. Damaged caches and checkpoints, and killed builds and trainings, are tried
in core/test_cache.py and core/test_resume.py. All of it: pytest -m slow tests/test_attack.py tests/core.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import ROOT, TESTS, killed
from publish import publish, whole_record
from small_notebooks import commit, make_checkout, plain, whole
from tiny import points

from speedkit import tune
from speedkit.files import read_json
from speedkit.lab import provenance
from speedkit.lab.record import read_notebook
from speedkit.lab.records import validate_record
from speedkit.measure.stages import NAME
from speedkit.train import checkpoint_file

pytestmark = pytest.mark.slow
GUARD_S = 180  # what takes so long hangs
ENDLESS = ("train", "tiny:points", "--steps", "1000000", "--log-every", "5", "--out", "out")


@pytest.fixture
def started(tmp_path):
    """Start the command line as a user does, in a terminal session and a folder of its own."""
    processes = []

    def started(number, *words, start=("-m", "speedkit"), **options):
        folder = tmp_path / f"{number}"
        folder.mkdir(exist_ok=True)
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}", "PYTHONFAULTHANDLER": "1"}
        environment |= options.pop("variables", {})
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        options = pipes | {"start_new_session": True} | options
        process = subprocess.Popen([sys.executable, *start, *words], cwd=folder, env=environment, **options)
        processes.append(process)
        return process, folder / "out"

    yield started
    for process in processes:
        process.kill()
        process.wait()


def wait_for(happened, process):
    until_s = time.monotonic() + GUARD_S
    while not happened():
        assert process.poll() is None and time.monotonic() < until_s, "it did not begin"
        time.sleep(0.005)


def end_of(process):
    """Return the exit code of a process and what it complained, once its workers are gone, too."""
    try:
        complaint = process.communicate(timeout=GUARD_S)[1]
    except subprocess.TimeoutExpired:
        for hanging in [*psutil.Process(process.pid).children(recursive=True), process]:
            hanging.send_signal(signal.SIGABRT)  # faulthandler prints where each of its threads is
        pytest.fail(f"hangs:\n{process.communicate(timeout=GUARD_S)[1]}")
    assert "Traceback" not in complaint, complaint
    assert complaint.count("speedkit: ") <= 1, complaint
    return process.returncode, complaint


@pytest.fixture
def two_at_a_time(attack):
    """Try `attempt(number, what)` with each `what` of a group."""

    def two_at_a_time(group, attempt, whats):
        def one(number, what):
            with tried(f"{what}"):
                attempt(number, what)

        with attack(group) as tried, concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(one, itertools.count(), whats))

    return two_at_a_time


def moments(count, longest_s):
    """Seconds to wait before something is done to a process."""
    rng = random.Random(0)
    return [rng.uniform(0, longest_s) for _ in range(count)]


# Ctrl-C. Each epoch of six steps starts two workers.


@pytest.mark.parametrize(("group", "times"), [("Ctrl-C while workers start", 20), ("a second Ctrl-C", 20)])
def test_ctrl_c_is_acted_on_while_workers_start(group, times, started, two_at_a_time):
    def attempt(number, wait_s):
        process, out = started(number, *ENDLESS, "--workers", "2")
        wait_for((out / ".speedkit-run").exists, process)
        time.sleep(wait_s)
        os.killpg(process.pid, signal.SIGINT)
        if group == "a second Ctrl-C":
            time.sleep(wait_s / 2)
            with contextlib.suppress(ProcessLookupError):  # the first one may have ended it by then
                os.killpg(process.pid, signal.SIGINT)
        code, complaint = end_of(process)
        assert code == 130, complaint

    two_at_a_time(group, attempt, moments(times, 0.5))


IMPORTING = """
import sys

def tell(event, arguments):
    if event == "import" and arguments[0] == "speedkit.cli":
        print("begun", flush=True)

sys.addaudithook(tell)
from speedkit.__main__ import main
main()
"""


def test_ctrl_c_during_imports_is_one_sentence(started, two_at_a_time):
    def attempt(number, wait_s):
        process, _ = started(number, *ENDLESS, start=("-c", IMPORTING), stdout=subprocess.PIPE)
        assert process.stdout.readline() == "begun\n"
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        code, complaint = end_of(process)
        assert code == 130 and "stopped by SIGINT" in complaint

    two_at_a_time("Ctrl-C during imports", attempt, moments(6, 1.5))


# Output that is gone.


def test_a_closed_terminal_ends_a_training_with_a_checkpoint(started, two_at_a_time):
    def attempt(number, wait_s):
        terminal, inside = os.openpty()
        ends = {"stdin": inside, "stdout": inside, "stderr": inside, "start_new_session": False}
        login = functools.partial(os.login_tty, inside)
        process, out = started(number, *ENDLESS, "--workers", f"{number % 2}", preexec_fn=login, **ends)
        os.close(inside)
        wait_for((out / "checkpoint.pt").exists, process)
        time.sleep(wait_s)
        os.close(terminal)
        assert process.wait(GUARD_S) == 128 + signal.SIGHUP
        assert checkpoint_file.read(out / "checkpoint.pt")["step"] > 0

    two_at_a_time("closed terminal", attempt, moments(6, 0.5))


@pytest.mark.parametrize("group", ["closed pipe", "full disk"])
def test_a_training_goes_on_without_its_output(group, started, two_at_a_time):
    words = ["train", "tiny:points", "--log-every", "1", "--out", "out", "--workers"]

    def attempt(number, what):
        gone, workers = what
        with open("/dev/full", "w") as full:
            end = full if group == "full disk" else subprocess.PIPE
            process, out = started(number, *words, workers, **dict.fromkeys(gone, end))
            if group == "closed pipe":
                for name in gone:
                    getattr(process, name).close()
            assert process.wait(GUARD_S) == 0 and (out / "history.json").exists()

    two_at_a_time(group, attempt, itertools.product([("stdout",), ("stderr",), ("stdout", "stderr")], "01"))


# What ends a run with worker processes.

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


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("os.killpg(os.getpid(), signal.SIGINT)", 130, "stopped by SIG"),
        ("os.killpg(os.getpid(), signal.SIGHUP)", 129, "stopped by SIGHUP after step 3"),
        ("os.killpg(os.getpid(), signal.SIGHUP)", 0, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
    ids=["ctrl-c", "hang-up", "nohup", "killed"],
)
def test_a_run_ends_with_one_sentence_and_leaves_no_process(fault, code, words, tmp_path, started):
    (tmp_path / "faulty.py").write_text(FAULTY.format(fault=fault))
    options = {} if code else {"preexec_fn": functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)}
    process, _ = started(".", "train", "faulty:workload", "--workers", "2", **options)
    _, complaint = process.communicate(timeout=GUARD_S)
    assert process.returncode == code and words in complaint, complaint
    assert complaint.count("\n") == 1 or code <= 0, complaint  # workers may say that their pipe broke
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)  # which asks whether anyone is left
            time.sleep(0.1)


# Kills.


def tune_on(out, cache):
    os.environ["SPEEDKIT_CACHE_DIR"] = str(cache)
    few = {"optimizations": ("host_syncs",), "pairs": 12, "seeds": 2, "progress": False}
    return tune(points(train=64, test=32, epochs=1), device="cpu", out=out, resume=True, budget_s=1e5, **few)


def test_a_killed_tuning_goes_on_from_what_was_measured(tmp_path, monkeypatch, attack):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))
    rng, kills = random.Random(0), 0
    with attack("tunings killed and resumed") as tried:
        while kills < 6:
            out = tmp_path / f"{kills}"
            with tried(out.name):
                kills += killed(tune_on, out, tmp_path / "cache", after_s=rng.uniform(0.1, 3.0))
                before = read_json(out / NAME)["stages"] if (out / NAME).exists() else []
                assert validate_record(tune_on(out, tmp_path / "cache")) == []
                assert read_json(out / NAME)["stages"][: len(before)] == before


def test_a_killed_run_of_a_notebook_leaves_the_old_file_and_no_kernel(tmp_path, started, attack):
    begin = "import os, time\nopen('kernels', 'a').write(f'{os.getpid()}\\n')"
    source = plain(tmp_path / "n.ipynb", begin, *["time.sleep(0.2)"] * 5, "print('whole')")
    kernels, out = tmp_path / "runs" / "kernels", tmp_path / "runs" / "out" / "n.ipynb"
    out.parent.mkdir(parents=True)
    out.write_text("old")
    with attack("runs of a notebook killed") as tried:
        for wait_s in moments(6, 0.8):
            with tried(f"{wait_s:.3f} s after its first cell"):
                kernels.unlink(missing_ok=True)
                process, _ = started("runs", "run", source, "--out", "out")
                wait_for(kernels.exists, process)
                time.sleep(wait_s)
                process.kill()
                process.wait()
                kernel = int(kernels.read_text())
                left = [psutil.Process(kernel)] if psutil.pid_exists(kernel) else []
                assert psutil.wait_procs(left, timeout=60)[1] == [] and out.read_text() == "old"
    assert end_of(started("runs", "run", source, "--out", "out")[0])[0] == 0
    assert "whole" in str(read_notebook(out).cells[-1].outputs)


def publish_in(folder):
    """Publish the lesson of a checkout, as `speedkit publish 21` does there."""
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "SPEEDKIT_NOTEBOOKS": str(folder / "notebooks")}
    provenance.PACKAGE = folder / "speedkit"
    return publish(["21"])


def test_a_killed_publishing_leaves_the_old_lesson_or_the_whole_new_one(tmp_path, monkeypatch, attack):
    lesson = whole(make_checkout(tmp_path, monkeypatch) / "21_tiny.ipynb", "import time\ntime.sleep(1)")
    commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    before, rng, kills = lesson.read_bytes(), random.Random(0), 0
    with attack("publishing killed") as tried:
        while kills < 6:
            with tried(f"{kills}"):
                kills += killed(publish_in, tmp_path, after_s=rng.uniform(0.5, 6.0))
                assert lesson.read_bytes() == before or whole_record(lesson)
                for record in lesson.parent.glob("records/*/*.json"):
                    assert validate_record(read_json(record)) == [] and whole_record(lesson)
                assert publish_in(tmp_path)["21_tiny"] in ("published", "current")
                assert not list(lesson.parent.rglob("*.tmp")) and whole_record(lesson)
            shutil.rmtree(lesson.parent / "records")
            lesson.write_bytes(before)


# Hostile input.

BOMB = "a: &a x\n"
for before, name in itertools.pairwise("abcdefghi"):
    BOMB += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
PLANS = {
    "bomb": BOMB.encode(),
    "lists": b"[" * 100_000,
    "mappings": b"{a: " * 100_000,
    "itself": b"workers: &a [*a]",
    "self": b"self: 1",
    "twice": b"workers: 1\nworkers: 2",
    "long": b"workers: " + b"9" * 100_000,
    "latin-1": b"caf\xe9: 1",
    "zeros": bytes(1000),
    "empty": b"",
}


def test_hostile_input_is_one_sentence(tmp_path, started, recordings, speedkit, attack):
    tones = shutil.copytree(recordings, tmp_path / "tones")
    with attack("hostile input") as tried:
        for name, text in PLANS.items():
            with tried(f"plan {name}"):
                (tmp_path / name).write_bytes(text)
                check_refused(speedkit("train", "tiny:points", "--plan", tmp_path / name, "--out", tmp_path / "no"))
        for clips in ("0", "-5", "1e9", "1" * 99):
            with tried(f"clips {clips:.9}"):
                check_refused(speedkit("train", "audio", "--clips", clips, "--out", tmp_path / "no"))
        with tried("Latin-1 names"):
            os.link(tones / "low" / "low_0.wav", os.fsencode(tones / "low") + b"/caf\xe9.wav")
            words = ("--data-dir", tones, "--size", "tiny", "--steps", "2", "--out", tmp_path / "left")
            code, _, complaint = speedkit("train", "audio", *words)
            assert code == 0 and b"caf\xe9.wav" in (tmp_path / "left" / "quarantine.csv").read_bytes(), complaint
        endings = {
            "HOME=/": {"variables": {"HOME": "/", "SPEEDKIT_CACHE_DIR": ""}},
            "150 workers": {},
            "no home": {"variables": {"HOME": "/no/such", "SPEEDKIT_CACHE_DIR": ""}},
        }
        for number, (name, options) in enumerate(endings.items()):
            with tried(name):
                process, out = started(number, "train", "tiny:points", "--out", "out", "--workers", "150", **options)
                most = 0
                while process.poll() is None:
                    most = max(most, len(psutil.Process(process.pid).children()))
                    time.sleep(0.05)
                assert end_of(process)[0] == 0 and (out / "history.json").exists()
                assert most <= 4 * (os.cpu_count() or 1)


def check_refused(ended):
    code, _, complaint = ended
    assert code == 2 and complaint.startswith("speedkit: ") and complaint.count("\n") == 1 and len(complaint) < 1000
