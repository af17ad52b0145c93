"""Several ranks learn what one learns, and whatever ends one ends all or starts all again.

The tests start real processes, which import this file; `python -m test_ranks CASES RESULTS` trains CASES.
"""

import atexit
import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from faults import strike
from tiny import calling, load, masked_loss, points, slowed, trained, valid_items

from speedkit.errors import BadItem, PlanError
from speedkit.plan import Plan

HERE = Path(__file__).resolve().parent

# ---- what the ranks train ----


def load_some(item, bad, infinite):
    if int(item.path) in bad:
        raise BadItem(item.path, "cut short")
    return load(item, 8) * (float("inf") if int(item.path) in infinite else 1.0)


def faulty(bad=(), infinite=(), **options):
    """Points of which some cannot be read and some are infinite."""
    reading = functools.partial(load_some, bad=bad, infinite=infinite)
    return dataclasses.replace(points(**options), load=reading, sources=(load_some,))


def overflowing(**options):
    """Points of which one has a loss that is not finite, and gradients that are."""
    work = points(**options)

    def loss(model, batch, recipe):
        value, outputs = work.loss(model, batch, recipe)
        return value + torch.where(batch.inputs.amax() > 6.5, torch.inf, 0.0), outputs

    return dataclasses.replace(work, loss=loss)


def counted(**options):
    """Points whose loss is that of a few samples, of which a part may hold none."""
    return dataclasses.replace(points(**options), loss=masked_loss, count=valid_items)


def weary():
    """Points that take their time, for runs that are interrupted."""
    return slowed(points(train=90, epochs=6, batch_size=15), 0.1)


def failing():
    """Points of which rank 1 runs out of memory; rank 0 aborts on its way out, as gloo's threads do at times."""
    if os.environ.get("RANK") == "0":
        atexit.register(os.abort)
    calls = itertools.count(1)

    def fail(model, batch):
        if next(calls) == 5 and os.environ.get("RANK") == "1":
            strike("cuda")

    return calling(points(), fail)


def train_cases(cases, results):
    """Train each case on one rank and on all, in the same processes; rank 0 writes both."""
    courses = []
    for name, options, recipe, plan in json.loads(Path(cases).read_text()):
        courses.append([])
        for ranks in (1, int(os.environ["WORLD_SIZE"])):
            workload = globals()[name](**options)
            recipe_now = dataclasses.replace(workload.recipe, **recipe)
            history = trained(workload, recipe_now, Plan(log_every=1, ranks=ranks, **plan))
            weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in history.model.parameters()]
            numbers = [*history.loss, *torch.cat([weight.detach().flatten() for weight in weights]).tolist()]
            skipped = [step["step"] for step in history.skipped]
            courses[-1].append([numbers, history.evaluation, skipped, history.quarantined])
    if os.environ["RANK"] == "0":
        Path(results).write_text(json.dumps(courses))


# ---- the tests ----


def test_ranks_that_nobody_started_are_refused_with_how_to_start_them():
    with pytest.raises(PlanError, match=r"speedkit train WORKLOAD --ranks 2.*torchrun --nproc-per-node 2"):
        trained(points(), plan=Plan(ranks=2))


CASES = [
    ("points", {"train": 97, "test": 39}, {"clip_norm": 0.5}, {"micro_batch": 3, "fused_optimizer": True}),
    ("counted", {"train": 89}, {"clip_norm": 0.5, "optimizer": "sgd"}, {"micro_batch": 3, "strategy": "fsdp"}),
    ("faulty", {"bad": (1, 30), "train": 90}, {}, {"strategy": "fsdp", "micro_batch": 2}),
    ("faulty", {"infinite": (11,), "train": 90}, {"on_nonfinite": "skip"}, {"fused_optimizer": True}),
    ("faulty", {"infinite": (11,), "train": 90}, {"on_nonfinite": "skip"}, {"strategy": "fsdp"}),
    ("overflowing", {"train": 90}, {"on_nonfinite": "skip"}, {"fused_optimizer": True}),
]


@pytest.fixture(scope="module", autouse=True)
def importable():
    """Let the ranks import this file, and be found among all processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}:{HERE.parent}:{os.environ.get('PYTHONPATH', '')}")
        yield


@pytest.fixture(scope="module")
def courses(tmp_path_factory):
    """Every case, trained on one rank and on two by the same two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases").write_text(json.dumps(CASES))
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2"]
    job = ["test_ranks", str(folder / "cases"), str(folder / "results")]
    subprocess.run([sys.executable, "-m", *torchrun, "-m", *job], check=True, timeout=300)
    return json.loads((folder / "results").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: f"{CASES[index][0]}-{index}")
def test_two_ranks_learn_what_one_learns_from_the_same_batches(courses, index):
    (numbers, evaluation, *rest), (numbers_of_two, evaluation_of_two, *rest_of_two) = courses[index]
    close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5, equal_nan=True)
    close(torch.tensor(numbers_of_two), torch.tensor(numbers))
    assert evaluation_of_two == pytest.approx(evaluation, abs=0.03)
    assert rest_of_two == rest
    assert len(rest[0]) == 2 * ("on_nonfinite" in CASES[index][2]), "bad in one rank, left out in all, in each epoch"


def start(folder, workload="weary", *more, ranks=2):
    """Start a training in ranks."""
    words = ["train", f"test_ranks:{workload}", "--device", "cpu", "--out", folder, "--ranks", ranks]
    words += ["--log-every", 1, *more]
    words = [sys.executable, "-m", "speedkit", *map(str, words)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, code=0):
    """Wait for the end; return what was printed. No rank may be left."""
    ranks = psutil.Process(process.pid).children() if process.poll() is None else []
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        _, left = psutil.wait_procs(ranks, timeout=30)
        for rank in left:
            rank.kill()
    assert (process.returncode, left) == (code, []), err
    assert "Traceback" not in err
    return out, err


def wait_for_checkpoint(folder, process):
    while not (folder / "checkpoint.pt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def losses(folder):
    return json.loads((folder / "history.json").read_text())["loss"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    out, err = ended(start(folder, "weary", "--strategy", "fsdp"))
    assert (out.count("36 steps in"), err) == (1, ""), "rank 0 alone is heard"
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((2, "fsdp"), (1, "ddp")), ((1, "ddp"), (2, "fsdp"))])
def test_a_signal_leaves_a_checkpoint_that_any_number_of_ranks_goes_on_from(before, after, tmp_path, uninterrupted):
    process = start(tmp_path, "weary", "--strategy", before[1], "--workers", 1, ranks=before[0])
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, err = ended(process, 143)
    assert "stopped by" in err and "--resume goes on from" in err
    other = ("--strategy", after[1], "--fused-optimizer")  # whose learning rate is a tensor
    assert ended(start(tmp_path, "weary", *other, "--resume", ranks=after[0]))[1] == ""
    history = json.loads((tmp_path / "history.json").read_text())
    assert 6 <= history["resumed_from"] < 36
    assert history["loss"] == pytest.approx(uninterrupted, rel=1e-4)


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_loss_curve_goes_on_exactly(tmp_path, uninterrupted):
    process = start(tmp_path, "weary", "--strategy", "fsdp")
    wait_for_checkpoint(tmp_path, process)
    [rank] = [child for child in psutil.Process(process.pid).children() if child.environ()["RANK"] == "1"]
    rank.kill()
    _, err = ended(process)
    assert "rank 1 was killed; all start again from the last checkpoint" in err
    assert losses(tmp_path) == uninterrupted
    assert json.loads((tmp_path / "history.json").read_text())["resumed_from"]


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_message(tmp_path):
    _, err = ended(start(tmp_path, "failing"), 1)
    assert err.count("out of memory at step 5 on rank 1") == 1, "an error is not tried again"


if __name__ == "__main__":
    train_cases(*sys.argv[1:])
    os._exit(0)  # Python's way out makes gloo's threads abort at times
