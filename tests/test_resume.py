"""Interrupted runs: what is left behind is whole, and going on from it is the run that was never interrupted."""

import dataclasses
import resource

import pytest
from faults import interrupting
from tiny import emulating, jitter, points

from speedkit.errors import Interrupted, SpeedkitError, UsageError
from speedkit.plan import Plan
from speedkit.train import checkpoint
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run


@pytest.fixture(autouse=True)
def every_number_format(monkeypatch):
    monkeypatch.setattr("speedkit.train.setup.this_machine", emulating)


def lively(**recipe):
    """7 steps an epoch, 14 in all, with every source of randomness on."""
    return points(train=100, augment=jitter, dropout=0.2, clip_norm=1.0, **recipe)


@pytest.fixture
def stopped(tmp_path):
    """A folder that holds a run interrupted after step 5."""
    with pytest.raises(Interrupted):
        fit(interrupting(lively(), 5), plan=Plan(log_every=1), device="cpu", progress=False, out=tmp_path)
    return tmp_path


def test_a_run_can_go_on_with_a_fused_optimizer_whose_rate_stays_in_its_tensor(stopped):
    whole = fit(lively(), plan=Plan(log_every=1), device="cpu", progress=False)
    fused = Plan(fused_optimizer=True, log_every=1)
    run = setup_run(lively(), plan=fused, resume=True, device="cpu", progress=False, out=stopped)
    rate = run.optimizer.param_groups[0]["lr"]
    for step in steps(run):
        assert run.optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(run.learning_rates[step - 1])
    assert run.finish().loss == pytest.approx(whole.loss, abs=1e-5)
    run.close()


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (lively(learning_rate=0.5), r"learning_rate is 0.01 there, 0.5 here"),
        (dataclasses.replace(lively(), name="lines"), "workload is points there, lines here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(stopped, workload, message):
    with pytest.raises(UsageError, match=message):
        fit(workload, device="cpu", progress=False, out=stopped, resume=True)


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_one_before(stopped):
    path = stopped / checkpoint.NAME
    before = path.read_bytes()
    run = setup_run(lively(), device="cpu", progress=False, out=stopped, resume=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # writing more fails, as on a full disk
    try:
        checkpoint.save(run)
        with pytest.raises(SpeedkitError, match="could not be written"):
            run.writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        run.close()
    assert path.read_bytes() == before
    assert not list(stopped.glob("*.tmp")) + list(stopped.glob(".*.tmp"))
