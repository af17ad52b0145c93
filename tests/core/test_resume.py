"""Interrupted runs: what is left behind is whole, verified when it is read, and going on from it changes nothing."""

import dataclasses
import io
import itertools
import pickle
import random
import shutil

import pytest
import torch
import xxhash
from faults import largest_file
from processes import killed
from tiny import jitter, opened, outcome, points, trained

from speedkit.errors import SpeedkitError, UsageError
from speedkit.plan import Plan
from speedkit.train import checkpoint, checkpoint_file, run
from speedkit.train.fit import finish
from speedkit.train.loop import steps

PLAN = Plan(log_every=1, validate_every=2)


def lively(**recipe):
    """7 steps an epoch, 14 in all, with every source of randomness on."""
    return points(train=100, augment=jitter, dropout=0.2, clip_norm=1.0, **recipe)


@pytest.fixture
def stopped(tmp_path):
    """A folder of a run stopped after step 9, with checkpoints of steps 6 and 8, in buffers that are used again."""
    with opened(lively(), out=tmp_path, plan=PLAN) as run:
        buffers = [
            {buffer.data_ptr() for buffer in run.reporting.writer.buffers} for _ in itertools.islice(steps(run), 9)
        ]
    assert buffers[2] and buffers[2] == buffers[8]
    return tmp_path


def test_a_run_can_go_on_with_a_fused_optimizer_whose_rate_stays_in_its_tensor(stopped):
    whole = trained(lively(), plan=PLAN)
    plan = Plan(fused_optimizer=True, log_every=1)
    with opened(lively(), plan=plan, out=stopped, resume=True) as run:
        rate = run.learner.optimizer.param_groups[0]["lr"]
        for step in steps(run):
            assert run.learner.optimizer.param_groups[0]["lr"] is rate
            assert float(rate) == pytest.approx(run.learner.learning_rates[step - 1])
        assert finish(run).loss == pytest.approx(whole.loss, abs=1e-5)


def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(stopped):
    with pytest.raises(UsageError, match=r"learning_rate is 0.01 there, 0.5 here"):
        trained(lively(learning_rate=0.5), out=stopped, resume=True, plan=PLAN)


def renamed(workload, old, new):
    """The workload, with `new` in place of `old` in the paths of its items."""
    items = [dataclasses.replace(item, path=item.path.replace(old, new)) for item in workload.train]
    return dataclasses.replace(workload, train=items)


def test_other_items_other_classes_and_another_model_are_refused_and_another_folder_is_not(stopped):
    others = [renamed(lively(), "7", "8"), dataclasses.replace(lively(), classes=("cat", "dog"))]
    for other in others:
        with pytest.raises(UsageError, match="names of items and classes is"):
            trained(other, out=stopped, resume=True, plan=PLAN)
    with pytest.raises(UsageError, match=r"belongs to another model: size mismatch.*") as caught:
        trained(dataclasses.replace(lively(), model=points(hidden=8).model), out=stopped, resume=True, plan=PLAN)
    assert "\n" not in str(caught.value)
    moved = dataclasses.replace(
        lively(), train=[dataclasses.replace(item, path=f"a/{item.path}") for item in lively().train]
    )
    assert run.names_in(moved) == run.names_in(lively())


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(stopped):
    first = opened(lively(), out=stopped, resume=True, plan=PLAN)
    with first, pytest.raises(UsageError, match="another run goes on"):
        trained(lively(), out=stopped, resume=True, plan=PLAN)
    assert trained(lively(), out=stopped, resume=True, plan=PLAN).steps == 14


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_one_before(stopped):
    path = stopped / checkpoint_file.NAME
    before = path.read_bytes()
    with opened(lively(), out=stopped, resume=True, plan=PLAN) as run, largest_file(4096):
        checkpoint.save(run)
        with pytest.raises(SpeedkitError, match="could not be written"):
            run.reporting.writer.wait()
    assert path.read_bytes() == before
    assert not list(stopped.glob("*.tmp")) + list(stopped.glob(".*.tmp"))


def test_a_flipped_bit_is_found_and_the_run_goes_on_from_the_one_before(stopped, capsys):
    path = stopped / checkpoint_file.NAME
    assert torch.load(path, weights_only=True)["step"] == 8
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    resumed = trained(lively(), out=stopped, resume=True, plan=PLAN, progress=True)
    assert resumed.resumed_from == 6
    assert outcome(resumed) == outcome(trained(lively(), plan=PLAN))
    assert "checksum is wrong: it was cut short or changed" in "".join(capsys.readouterr())


def test_with_all_of_them_damaged_nothing_is_made_up(stopped):
    torch.save({"epoch": 3}, stopped / checkpoint_file.NAME)  # that of another program
    (stopped / checkpoint_file.PREVIOUS).write_bytes(b"")
    with pytest.raises(SpeedkitError, match=r"checkpoint\.pt cannot be read, nor can one before it: remove it"):
        trained(lively(), out=stopped, resume=True, plan=PLAN)


@pytest.mark.slow
def test_a_checkpoint_of_an_older_version_is_gone_on_from(stopped):
    path = stopped / checkpoint_file.NAME
    state = checkpoint_file.read(path)
    [state["rng"]] = state.pop("ranks_rng")  # as a run of one rank had it
    path.write_bytes(saved(state))
    assert outcome(trained(lively(), out=stopped, resume=True, plan=PLAN)) == outcome(trained(lively(), plan=PLAN))


def test_what_is_written_is_the_state_at_the_time_of_the_call(tmp_path):
    with opened(lively(), out=tmp_path, plan=PLAN) as run:
        next(steps(run))
        weights = {name: weight.clone() for name, weight in run.learner.model.state_dict().items()}
        checkpoint.save(run)
        for weight in run.learner.model.parameters():
            weight.data.fill_(7.0)
    state = checkpoint_file.read(tmp_path / checkpoint_file.NAME)
    assert all(torch.equal(state["model"][name], weight) for name, weight in weights.items())


def large():
    """A run whose checkpoints, of 12 MB, take a good part of its time to write."""
    return lively(steps=60, epochs=None, hidden=60_000)


def resume_large(folder):
    torch.set_num_threads(1)
    trained(large(), out=folder, resume=True, plan=Plan(log_every=1, validate_every=1))


@pytest.mark.slow
def test_killed_at_random_moments_a_run_still_ends_as_the_uninterrupted_one(tmp_path, attack):
    rng, kills, folder = random.Random(0), 0, tmp_path / "0"
    whole = trained(large(), plan=Plan(log_every=1, validate_every=0))
    with attack("kills while training and resuming") as tried:
        while kills < 21:
            if not killed(resume_large, folder, after_s=rng.uniform(0.05, 2.0)):
                check_whole(folder, whole)
                folder = tmp_path / f"{kills}"
                continue
            kills += 1
            with tried(f"kill {kills}"):
                for path in folder.glob("checkpoint*.pt"):
                    losses = checkpoint_file.read(path)["history"]["loss"]
                    assert losses == whole.loss[: len(losses)]
    resume_large(folder)
    check_whole(folder, whole)


def check_whole(folder, whole):
    state = checkpoint_file.read(folder / checkpoint_file.NAME)
    assert state["history"]["loss"] == whole.loss
    assert all(torch.equal(state["model"][name], weight) for name, weight in whole.model.state_dict().items())


class Crafted:
    """What makes the file at `path` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def saved(value):
    """Return the bytes of a checkpoint file that holds `value`, with its checksum."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return with_checksum(stream.getvalue())


def with_checksum(content):
    return content + xxhash.xxh3_64_digest(content)


def flipped(content, rng):
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over_or_refused_and_run_no_code(stopped, tmp_path_factory, attack):
    rng, folders = random.Random(0), tmp_path_factory.mktemp("damaged")
    made = folders / "made"
    before = {name: (stopped / name).read_bytes() for name in (checkpoint_file.NAME, checkpoint_file.PREVIOUS)}
    content = before[checkpoint_file.NAME]
    whole = outcome(trained(lively(), plan=PLAN))
    damaged = [flipped(content, rng) for _ in range(6)]
    damaged += [content[: rng.randrange(len(content))] for _ in range(5)]
    damaged += [b"", bytes(len(content)), saved({"epoch": 3}), saved([1])]
    damaged += [saved(Crafted(made)), with_checksum(pickle.dumps(Crafted(made)))]
    with attack("damaged checkpoints") as tried:
        for number, data in enumerate(damaged):
            for names, step in (([checkpoint_file.NAME], 6), ([checkpoint_file.PREVIOUS], 8), (before, None)):
                with tried(f"{number} in {[*names]}"):
                    folder = shutil.copytree(stopped, folders / f"{number}-{step}")
                    for name in names:
                        (folder / name).write_bytes(data)
                    if step is None:
                        with pytest.raises(SpeedkitError, match=r"cannot be read, nor can one before it") as caught:
                            trained(lively(), out=folder, resume=True, plan=PLAN)
                        assert "\n" not in str(caught.value)
                    else:
                        resumed = trained(lively(), out=folder, resume=True, plan=PLAN)
                        assert resumed.resumed_from == step and outcome(resumed) == whole
                    assert not made.exists(), "its code was run"
