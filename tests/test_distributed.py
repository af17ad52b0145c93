"""Several ranks: what they learn is what one learns, and whatever ends one ends or restarts all.

The tests start real processes. As a program (`python -m test_distributed CASES RESULTS`) this file is what they run.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from tiny import jitter, load, loss, points, slowed

from speedkit import resolve
from speedkit.data.decode import BadItem
from speedkit.errors import PlanError, SpeedkitError, UsageError
from speedkit.hardware import Hardware, this_machine
from speedkit.plan import Plan
from speedkit.train import distributed, launcher
from speedkit.train.loop import fit
from speedkit.workloads import load_workload

TESTS = Path(__file__).resolve().parent
CPU = torch.device("cpu")


# ---- in one process ----


def unreadable(item, bad, size=8):
    if int(item.path) in bad:
        raise BadItem(item.path, "cut short")
    return load(item, size)


def with_bad(*bad, **options):
    """Points of which these cannot be read."""
    made = points(**options)
    return dataclasses.replace(made, load=functools.partial(unreadable, bad=bad), sources=(unreadable,))


def test_outside_of_torchrun_the_error_names_the_commands():
    with pytest.raises(PlanError, match=r"speedkit train WORKLOAD --ranks 2.*torchrun --nproc-per-node 2"):
        fit(points(), plan=Plan(ranks=2), device="cpu", progress=False)


def test_ranks_that_the_machine_cannot_run_are_refused_in_a_sentence():
    two = Hardware(device=torch.device("cuda"), gpu="A100", gpu_count=2, compute_capability=(8, 0))
    with pytest.raises(PlanError, match="takes 3 GPUs here, and there are 2"):
        resolve(Plan(ranks=3), two)
    with pytest.raises(PlanError, match="use ranks=1"):
        resolve(Plan(ranks=2), Hardware(device=torch.device("mps"), gpu="M2"))
    few = dataclasses.replace(this_machine("cpu"), cores=2)
    [note] = resolve(Plan(ranks=3), few).fallbacks
    assert note.field == "ranks" and note.got == 3 and "take turns" in note.why


def test_what_ranks_cannot_do_together_falls_back_with_a_reason():
    machine = dataclasses.replace(this_machine("cpu"), cores=2, compiler="g++", python_headers=True)
    asked = Plan(ranks=2, strategy="fsdp", compile="default", channels_last=True)
    found = resolve(asked, machine)
    assert (found.plan.compile, found.plan.channels_last) == ("off", False) and len(found.fallbacks) == 2
    found = resolve(Plan(ranks=2, compile="max-autotune", compile_scope="step"), machine).plan
    assert (found.compile, found.compile_scope) == ("default", "model")
    alone = Plan(strategy="fsdp", compile="default", channels_last=True)
    assert resolve(alone, machine).plan == alone, "one rank is a plain run, whatever the strategy"


def test_a_launch_that_cannot_work_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="cannot share it evenly"):
        distributed.launch(["speedkit"], 3, nnodes=2, endpoint="localhost:29500")
    with pytest.raises(UsageError, match="HOST:PORT"):
        distributed.launch(["speedkit"], 2, nnodes=2)
    with socket.create_server(("localhost", 0)) as busy:
        endpoint = f"localhost:{busy.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"{endpoint}: Address already in use"):
            distributed.launch(["speedkit"], 2, endpoint=endpoint)
        monkeypatch.setattr(launcher, "MEETING_S", 0.5)
        with pytest.raises(UsageError, match=f"what listens at {endpoint} is no run of speedkit: give a free"):
            distributed.launch(["speedkit"], 2, nnodes=2, endpoint=endpoint)


# ---- what the ranks run ----


def plain_image():
    """The tiny image workload without what is random."""
    return dataclasses.replace(load_workload("image", size="tiny", clips=60), augment=None)


def poisoned(**options):
    """Points of which one is infinite."""
    made = points(**options)
    return dataclasses.replace(made, load=functools.partial(infinite, at=11))


def infinite(item, at, size=8):
    return load(item, size) * (float("inf") if int(item.path) == at else 1.0)


def cramped(sizes, **options):
    """Points that run out of memory on each rank with parts of more than its size."""
    return dataclasses.replace(points(**options), loss=functools.partial(cramped_loss, sizes=sizes))


def cramped_loss(model, batch, recipe, sizes):
    if len(batch[0]) > sizes[min(int(os.environ.get("RANK", 0)), len(sizes) - 1)] and model.training:
        raise torch.OutOfMemoryError("CUDA out of memory (as it would say)")
    return loss(model, batch, recipe)


MAKERS = {
    "points": points,
    "image": plain_image,
    "bad": functools.partial(with_bad, 1, 30),
    "poisoned": poisoned,
    "cramped": functools.partial(cramped, (100, 3)),
    "valid": lambda **options: dataclasses.replace(
        points(**options), count=lambda batch: batch[1].sum() + 1, loss=valid_loss
    ),
}


def valid_loss(model, batch, recipe):
    """A loss that is the mean over as many as `count` says: the samples of class 1, and one more."""
    outputs = model(batch[0])
    each = torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none")
    return ((each * batch[1]).sum() + each.sum() * 0 + 1.0) / (batch[1].sum() + 1), outputs


def train_cases(cases, results):
    """Train each case on one rank and on all in the same processes; rank 0 writes both courses."""
    found = []
    for name, options, recipe, plan in json.loads(Path(cases).read_text()):
        work, courses = MAKERS[name](**options), []
        learned = dataclasses.replace(work.recipe, **recipe)
        for ranks in (1, int(os.environ["WORLD_SIZE"])):
            asked = Plan(**{"log_every": 1, "ranks": ranks, **plan})
            history = fit(work, learned, asked, device="cpu", progress=False)
            weights = [
                weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
                for weight in history.model.parameters()
            ]
            courses.append(
                {
                    "loss": history.loss,
                    "evaluation": history.evaluation,
                    "skipped": history.skipped,
                    "weights": torch.cat([weight.flatten() for weight in weights]).tolist(),
                    "quarantined": history.quarantined,
                    "fallbacks": [str(one) for one in history.effective.fallbacks],
                }
            )
        found.append(courses)
    if os.environ["RANK"] == "0":
        Path(results).write_text(json.dumps(found))


def draws(_, results):
    """Write what each rank adds to its samples, and what dropout would draw next."""
    noises = []

    def noting(batch, generator):
        changed = jitter(batch, generator)
        noises.append((changed[0] - batch[0]).flatten()[:4].tolist())
        return changed

    fit(points(augment=noting, dropout=0.5, steps=3, epochs=None), plan=Plan(ranks=2), device="cpu", progress=False)
    Path(f"{results}.{os.environ['RANK']}").write_text(json.dumps([*noises, torch.rand(4).tolist()]))


def hang(_, __):
    """Leave rank 0 waiting for a gradient."""
    distributed.TIMEOUT_S = 3.0
    seconds = 60.0 * int(os.environ["RANK"])
    fit(slowed(points(), seconds), plan=Plan(ranks=2), device="cpu", progress=False)


def weary(seconds=0.1):
    """Points that take their time: for runs that are interrupted."""
    return slowed(points(train=90, epochs=6, batch_size=15), seconds)


def failing():
    """Points whose loss fails on rank 1 after some steps."""
    return dataclasses.replace(points(), loss=functools.partial(failing_loss, calls=[]))


def failing_loss(model, batch, recipe, calls):
    calls.append(1)
    if len(calls) == 5 and os.environ.get("RANK") == "1":
        raise SpeedkitError("the fifth batch was too much for this rank")
    return loss(model, batch, recipe)


# ---- in several ----


@pytest.fixture(autouse=True)
def found_by_ranks(monkeypatch):
    """Let ranks import this file, and be found among all processes by a mark of the test's own."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("TEST_MARK", mark)
    shared = set(os.listdir("/dev/shm"))
    yield mark
    end = time.monotonic() + 30
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.1)  # ranks whose launcher was killed end by themselves
    assert marked(mark) == [], "a process is left"
    assert {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} <= shared, "shared memory is left"


def marked(mark):
    """Return the processes that were started by the test with this mark, but for itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = "State:\tZ" not in (folder / "status").read_text()
            if f"TEST_MARK={mark}".encode() in (folder / "environ").read_bytes() and alive:
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def in_ranks(what, tmp_path, cases=()):
    """Run a function of this file in two ranks; return the exit code and where they wrote."""
    (tmp_path / "cases").write_text(json.dumps(cases))
    arguments = [what, str(tmp_path / "cases"), str(tmp_path / "results")]
    return distributed.launch(["test_distributed", *arguments], 2), tmp_path / "results"


CASES = [
    ("points", {"train": 97, "test": 33}, {}, {}),
    ("points", {"train": 97, "test": 33}, {"clip_norm": 0.5}, {"micro_batch": 3, "fused_optimizer": True}),
    ("points", {"train": 97, "test": 33}, {}, {"micro_batch": 3, "strategy": "fsdp"}),
    ("points", {}, {"clip_norm": 1.0}, {"strategy": "fsdp", "fused_optimizer": True, "on_nonfinite": "skip"}),
    ("points", {"train": 90}, {"optimizer": "sgd"}, {"strategy": "fsdp", "fused_optimizer": True, "workers": 1}),
    ("valid", {"train": 90}, {}, {"micro_batch": 3}),
    ("valid", {"train": 90}, {}, {"micro_batch": 3, "strategy": "fsdp"}),
    ("bad", {"train": 90}, {}, {"cache": "ram"}),
    ("bad", {"train": 90}, {}, {"strategy": "fsdp", "micro_batch": 2}),
    ("cramped", {"train": 90}, {}, {}),
    ("poisoned", {"train": 90}, {}, {"on_nonfinite": "skip", "fused_optimizer": True}),
    ("poisoned", {"train": 90}, {}, {"on_nonfinite": "skip", "strategy": "fsdp"}),
    ("image", {}, {"epochs": None, "steps": 5, "batch_size": 10, "mixup": 0.0}, {"micro_batch": 2}),
    ("image", {}, {"epochs": None, "steps": 5, "batch_size": 10, "mixup": 0.0}, {"strategy": "fsdp"}),
]


@pytest.fixture(scope="module")
def courses(tmp_path_factory):
    """The course of every case on one rank and on two, trained by the same two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        code, results = in_ranks("train_cases", tmp_path_factory.mktemp("ranks"), CASES)
    assert code == 0
    return json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: f"{CASES[index][0]}-{index}")
def test_two_ranks_learn_what_one_learns_from_the_same_batches(courses, index):
    one, two = courses[index]
    close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5, equal_nan=True)
    close(torch.tensor(two["loss"]), torch.tensor(one["loss"]))
    if CASES[index][0] != "image":  # whose weights, near no gradient, AdamW moves by the sign of a rounding error
        close(torch.tensor(two["weights"]), torch.tensor(one["weights"]))
    assert two["evaluation"]["n"] == one["evaluation"]["n"]
    assert two["evaluation"]["value"] == pytest.approx(one["evaluation"]["value"], abs=0.021)
    assert two["quarantined"] == one["quarantined"]
    assert [bad["step"] for bad in two["skipped"]] == [bad["step"] for bad in one["skipped"]]


@pytest.mark.slow
def test_decisions_are_those_of_all_ranks(courses):
    by_name = {name: (plan, *courses[index]) for index, (name, _, _, plan) in enumerate(CASES)}
    assert any("micro_batch" in note and "memory" in note for note in by_name["cramped"][2]["fallbacks"])
    skipped = next(two for (name, *_), (_, two) in zip(CASES, courses, strict=True) if name == "poisoned")["skipped"]
    assert skipped and all("11" in bad["why"] for bad in skipped), "the rank that has the sample names it"


@pytest.mark.slow
def test_ranks_draw_different_numbers_for_their_samples(tmp_path):
    code, results = in_ranks("draws", tmp_path)
    first, second = (json.loads(Path(f"{results}.{rank}").read_text()) for rank in range(2))
    assert code == 0 and len(first) == len(second) == 4
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_run_with_a_sentence(tmp_path, capfd):
    code, _ = in_ranks("hang", tmp_path)
    assert code == 1 and "another rank did not answer within" in capfd.readouterr().err


def command(folder, work="weary", *more, ranks=2):
    words = [
        sys.executable,
        "-m",
        "speedkit",
        "train",
        f"test_distributed:{work}",
        "--device",
        "cpu",
        "--log-every",
        "1",
        "--out",
        str(folder),
        "--ranks",
        str(ranks),
        *more,
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, code=0):
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def wait_for(path, process):
    end = time.monotonic() + 120
    while not path.exists() and time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert path.exists()


def losses(folder):
    return json.loads((folder / "history.json").read_text())["loss"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        out, err = ended(command(folder, "weary", "--strategy", "fsdp"))
    assert out.count("36 steps in") == 1 and err == "", "rank 0 alone is heard"
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_ends_all_ranks_with_a_checkpoint_that_any_number_goes_on_from(
    number, strategy, tmp_path, uninterrupted
):
    process = command(tmp_path / "run", "weary", "--strategy", strategy)
    wait_for(tmp_path / "run" / "checkpoint.pt", process)
    process.send_signal(number)
    _, err = ended(process, 128 + number)
    assert err.count("stopped by") == 1 and "--resume goes on from" in err
    assert len(losses(tmp_path / "run")) < 36
    ranks = 1 if number == signal.SIGTERM else 2
    ended(command(tmp_path / "run", "weary", "--resume", "--strategy", "ddp", ranks=ranks))
    assert losses(tmp_path / "run") == pytest.approx(uninterrupted, rel=1e-4)


def kill_rank(rank, mark):
    """Send SIGKILL to a rank, not to its loader, which has its environment too."""
    [pid] = [
        pid
        for pid in marked(mark)
        if os.getpgid(pid) == pid and f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_loss_curve_goes_on_exactly(tmp_path, found_by_ranks, uninterrupted):
    process = command(tmp_path / "run", "weary", "--strategy", "fsdp", "--workers", "1")
    wait_for(tmp_path / "run" / "checkpoint.pt", process)
    kill_rank(1, found_by_ranks)
    _, err = ended(process)
    assert "rank 1 was killed by SIGKILL; all ranks start again from the last checkpoint" in err
    assert losses(tmp_path / "run") == uninterrupted
    assert json.loads((tmp_path / "run" / "history.json").read_text())["resumed_from"]


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_behind(tmp_path):
    process = command(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoint.pt", process)
    process.kill()
    process.communicate()  # the fixture looks for what is left


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_message_alone(tmp_path):
    _, err = ended(command(tmp_path / "run", "failing"), 1)
    assert err == "speedkit: the fifth batch was too much for this rank\n"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    _, err = ended(command(tmp_path / "taken"), 2)
    assert "already holds files that speedkit did not write" in err and err.count("speedkit:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_two_agents_on_one_machine_make_one_run(killed, tmp_path, found_by_ranks, uninterrupted):
    with socket.create_server(("localhost", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    more = ("--nnodes", "2", "--rdzv-endpoint", endpoint)
    folders = [tmp_path / ("a" if killed else name) for name in ("a", "b")]  # what goes on needs the same checkpoint
    both = [command(folder, "weary", *more) for folder in folders]
    if killed:
        wait_for(folders[0] / "checkpoint.pt", both[0])
        kill_rank(1, found_by_ranks)
    said = [ended(process) for process in both]
    [written] = [path.parent for path in tmp_path.glob("*/history.json")]
    assert losses(written) == pytest.approx(uninterrupted, rel=1e-4)
    assert sum("36 steps in" in out for out, _ in said) == 1
    assert sum("rank 1 was killed by SIGKILL" in err for _, err in said) == int(killed)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
