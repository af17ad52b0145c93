"""Checkpoints: copied while the run stands still, written while it goes on, verified when they are read."""

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_resume import lively
from tiny import outcome

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.train import checkpoint
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

OPTIONS = {"plan": Plan(log_every=1, validate_every=2), "device": "cpu", "progress": False}


@pytest.fixture
def stopped(tmp_path):
    """A run stopped after step 9, with checkpoints of steps 6 and 8, in buffers that are used again."""
    run = setup_run(lively(), out=tmp_path, **OPTIONS)
    held = [{buffer.data_ptr() for buffer in run.writer.buffers} for _ in itertools.islice(steps(run), 9)]
    run.close()
    assert held[2] and held[2] == held[8]
    return tmp_path


@pytest.mark.parametrize("at", [0.5, 1.0], ids="at {:.0%}".format)
def test_a_flipped_bit_is_found_and_the_run_goes_on_from_the_one_before(stopped, capsys, at):
    path = stopped / checkpoint.NAME
    assert torch.load(path, weights_only=True)["step"] == 8
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)
    resumed = fit(lively(), out=stopped, resume=True, **OPTIONS | {"progress": True})
    assert resumed.resumed_from == 6
    assert outcome(resumed) == outcome(fit(lively(), **OPTIONS))
    assert "checksum is wrong: it was cut short or changed" in "".join(capsys.readouterr())


def test_with_all_of_them_damaged_nothing_is_made_up(stopped):
    torch.save({"epoch": 3}, stopped / checkpoint.NAME)  # that of another program
    (stopped / checkpoint.PREVIOUS).write_bytes(b"")
    with pytest.raises(SpeedkitError, match=r"checkpoint\.pt cannot be read, nor can one before it: remove it"):
        fit(lively(), out=stopped, resume=True, **OPTIONS)


def test_what_is_written_is_the_state_at_the_time_of_the_call(tmp_path):
    run = setup_run(lively(), out=tmp_path, **OPTIONS)
    next(steps(run))
    weights = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    checkpoint.save(run)
    for weight in run.model.parameters():
        weight.data.fill_(7.0)
    run.close()
    state = checkpoint.read(tmp_path / checkpoint.NAME)
    assert all(torch.equal(state["model"][name], weight) for name, weight in weights.items())


CHILD = """
import sys
sys.path[:0] = [sys.argv[1]]
import torch
torch.set_num_threads(1)
from test_checkpoint import OPTIONS, large
from speedkit.plan import Plan
from speedkit.train.fit import fit
print("begun", flush=True)
fit(large(), out=sys.argv[2], resume=True, **OPTIONS | {"plan": Plan(log_every=1, validate_every=1)})
print("done", flush=True)
"""


def large():
    """A run whose checkpoints, of 12 MB, take a good part of its time to write."""
    return lively(steps=60, epochs=None, hidden=60_000)


@pytest.mark.slow
def test_killed_at_random_moments_a_run_still_ends_as_the_uninterrupted_one(tmp_path):
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path)]
    rng, kills, ended = random.Random(0), 0, ""
    while "done" not in ended:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "begun\n"
        if kills < 5:
            time.sleep(rng.uniform(0.02, 0.6))
            child.send_signal(signal.SIGKILL)
        ended = child.stdout.read()
        kills += child.wait() == -signal.SIGKILL
        assert child.returncode in (0, -signal.SIGKILL)
    assert kills >= 3
    whole = fit(large(), **OPTIONS | {"plan": Plan(log_every=1, validate_every=0)})
    state = checkpoint.read(tmp_path / checkpoint.NAME)
    assert state["step"] == 60 and state["history"]["loss"] == whole.loss
    assert all(torch.equal(state["model"][name], weight) for name, weight in whole.model.state_dict().items())
