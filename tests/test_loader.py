"""Loading: one order for every plan, unreadable files left out and named, worker processes that end and can rest."""

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny import load, loss, points

from speedkit.data.auto import most_processes
from speedkit.data.decode import BadItem
from speedkit.data.loader import BatchStream
from speedkit.data.samples import shuffled
from speedkit.errors import PlanError, SpeedkitError
from speedkit.hardware import this_machine
from speedkit.plan import Plan, resolve
from speedkit.system import usable_ram_bytes
from speedkit.train.loop import begin, close, fit, steps

CPU = torch.device("cpu")


def load_unless_bad(item, size, bad):
    if item.path in bad:
        raise BadItem(item.path, "it is not audio")
    return load(item, size)


def with_bad(bad, **options):
    """The points, of which those whose path is in `bad` cannot be read."""
    workload = points(**options)
    reading = functools.partial(load_unless_bad, size=8, bad=frozenset(bad))
    return dataclasses.replace(workload, load=reading, parameters={"size": 8, "bad": sorted(bad)})


def stream(count, batch_size=16, seed=0, items=None, **plan):
    """The first `count` batches of the points."""
    workload = points()
    batches = BatchStream(workload, items or workload.train, Plan(**plan), batch_size, seed, CPU)
    try:
        return [batches.next() for _ in range(count)]
    finally:
        batches.close()


def state_of(pid):
    """The state of a process as Linux shows it: R, S, D running or waiting, T stopped; "" when it is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state == "Z" else state


# Order.


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone():
    torch.manual_seed(5)
    first = shuffled(100, seed=3, epoch=2)
    torch.manual_seed(6)
    torch.rand(10)
    assert torch.equal(shuffled(100, seed=3, epoch=2), first)
    assert sorted(first.tolist()) == list(range(100))
    assert not torch.equal(shuffled(100, seed=3, epoch=3), first)
    assert not torch.equal(shuffled(100, seed=4, epoch=2), first)


def test_loading_leaves_the_random_state_of_the_training_process_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    stream(8, workers=2)
    stream(8)
    assert torch.equal(torch.get_rng_state(), before)


THREADS = {"workers": 2, "worker_kind": "thread"}


@pytest.mark.parametrize("plan", [{"workers": 1}, {"workers": 2, "prefetch_factor": 1}, THREADS], ids=str)
def test_workers_change_no_batch(plan):
    for mine, theirs in zip(stream(14, **plan), stream(14), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_each_epoch_holds_every_item_once_and_ends_with_the_rest():
    batches = stream(14, batch_size=16, items=points(train=100).train)  # 6 of 16 and 1 of 4, twice
    assert [len(inputs) for inputs, _ in batches] == [16, 16, 16, 16, 16, 16, 4] * 2
    epochs = [torch.cat([inputs for inputs, _ in part]) for part in (batches[:7], batches[7:])]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(dim=0).values for epoch in epochs))
    assert len(epochs[0].unique(dim=0)) == 100


def test_drop_last_leaves_the_rest_out_of_training_and_not_out_of_evaluation():
    items = points(train=100).train
    assert {len(inputs) for inputs, _ in stream(14, items=items, drop_last=True)} == {16}
    batches = BatchStream(points(), items, Plan(drop_last=True), 16, None, CPU)
    assert sum(len(inputs) for inputs, _ in batches.one_pass()) == 100


@pytest.mark.parametrize("start", [(0, 5), (0, 6), (1, 2)], ids=str)
@pytest.mark.parametrize("plan", [{}, {"workers": 2}, THREADS], ids=str)
def test_a_stream_goes_on_from_any_position(start, plan):
    whole = stream(12)
    batches = BatchStream(points(), points().train, Plan(**plan), 16, 0, CPU)
    batches.epoch, batches.position = start
    there = start[0] * 6 + start[1]
    for expected in whole[there : there + 4]:
        assert torch.equal(batches.next()[0], expected[0])
    batches.close()


# Unreadable items.


@pytest.mark.parametrize("plan", [{}, {"workers": 2}, THREADS, {"cache": "ram"}, {"cache": "disk"}], ids=str)
def test_an_unreadable_item_is_left_out_and_named_and_training_goes_on(tmp_path, plan):
    workload = with_bad({"3", "40", "101"})  # two of 96 to train on, one of 32 to test on
    options = {"device": "cpu", "progress": False}
    live = fit(workload, plan=Plan(log_every=1), **options)
    history = fit(workload, plan=Plan(log_every=1, **plan), out=tmp_path, **options)
    assert history.loss == live.loss
    assert history.evaluation == live.evaluation
    assert history.evaluation["n"] == 31
    assert history.steps == 12
    assert history.quarantined == dict.fromkeys(("3", "40", "101"), "it is not audio")
    lines = (tmp_path / "quarantine.csv").read_text().splitlines()
    assert lines == ["path,why", "101,it is not audio", "3,it is not audio", "40,it is not audio"]


@pytest.mark.parametrize("plan", [{}, {"cache": "ram"}], ids=str)
def test_a_batch_of_nothing_but_unreadable_items_is_passed_over(plan):
    order = shuffled(96, seed=0, epoch=0).tolist()
    workload = with_bad({str(order[3])}, batch_size=1)
    live = fit(workload, plan=Plan(log_every=1, **plan), device="cpu", progress=False)
    assert len(live.loss) == live.steps == 192


@pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"cache": "ram"}], ids=str)
def test_too_many_unreadable_items_are_an_error_that_names_the_first(plan):
    bad = {str(number) for number in range(10, 15)}  # 5 of 96: more than 5 %
    with pytest.raises(SpeedkitError, match=r"of 96 files cannot be read.* the first is 1\d: it is not audio"):
        fit(with_bad(bad), plan=Plan(**plan), device="cpu", progress=False)


@pytest.mark.parametrize("plan", [{}, {"cache": "ram"}], ids=str)
def test_a_set_without_a_readable_item_is_an_error(plan):
    with pytest.raises(SpeedkitError, match=r"(cannot|can) be read.*it is not audio"):
        fit(with_bad({str(number) for number in range(96)}), plan=Plan(**plan), device="cpu", progress=False)


@pytest.mark.parametrize("plan", [{}, {"cache": "ram"}], ids=str)
def test_an_empty_set_is_an_error(plan):
    with pytest.raises(SpeedkitError, match="points has no readable item"):
        fit(dataclasses.replace(points(), train=[]), plan=Plan(**plan), device="cpu", progress=False)


# Worker processes.


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_end_when_the_run_is_closed(persistent):
    run = begin(points(), plan=Plan(workers=2, persistent_workers=persistent), device="cpu", progress=False)
    seen = set()
    for _ in steps(run):
        seen |= set(run.batches.pids) | set(run.test_batches.pids)
        assert len(run.batches.pids) == 2
    # Two epochs: two processes for training and two for evaluation, once or each time.
    assert len(seen) == (4 if persistent else 8)
    close(run)
    assert not [pid for pid in seen if state_of(pid)]


def test_worker_processes_end_when_training_fails():
    seen, before = [], children()

    def failing_loss(model, batch, recipe):
        seen.extend(pid for pid in children() if pid not in before)
        raise ValueError("a bug in the loss")

    workload = dataclasses.replace(points(), loss=failing_loss)
    with pytest.raises(ValueError, match="a bug"):
        fit(workload, plan=Plan(workers=2), device="cpu", progress=False)
    assert len(seen) == 2
    assert not [pid for pid in seen if state_of(pid)]


def children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def wait_for(pid, stopped):
    """Wait until the kernel reports that `pid` has been stopped, or goes on."""
    option = os.WSTOPPED if stopped else os.WCONTINUED
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, option | os.WNOWAIT)


def test_resting_worker_processes_stand_still_and_go_on_where_they_were():
    expected = stream(12)
    batches = BatchStream(points(), points().train, Plan(workers=2, persistent_workers=True), 16, 0, CPU)
    got = [batches.next()]
    pids = list(batches.pids)
    for _ in range(2):
        batches.signal_workers(signal.SIGSTOP)
        for pid in pids:
            wait_for(pid, stopped=True)
        assert [state_of(pid) for pid in pids] == ["T", "T"]
        batches.signal_workers(signal.SIGCONT)
        for pid in pids:
            wait_for(pid, stopped=False)
        assert "T" not in [state_of(pid) for pid in pids]
        got += [batches.next() for _ in range(5)]
    assert all(torch.equal(mine[0], theirs[0]) for mine, theirs in zip(got, expected, strict=False))
    batches.signal_workers(signal.SIGSTOP)
    batches.close()  # also ends those that rest
    assert not [pid for pid in pids if state_of(pid)]


def test_resting_threads_begin_no_item():
    loaded = []

    def noted(item):
        loaded.append(item.path)
        return load(item, 8)

    batches = BatchStream(dataclasses.replace(points(), load=noted), points().train, Plan(**THREADS), 16, 0, CPU)
    batches.next()
    batches.signal_workers(signal.SIGSTOP)
    assert not batches.loader.running.is_set()
    batches.signal_workers(signal.SIGCONT)
    for _ in range(5):
        batches.next()
    batches.close()
    assert sorted(loaded) == sorted(item.path for item in points().train)


# Features on the device.


def add_noise(waveforms, generator):
    return waveforms + torch.randn(waveforms.shape, generator=generator, device=waveforms.device)


@pytest.mark.parametrize("plan", [{}, {"workers": 2}], ids=str)
def test_features_computed_on_the_device_are_those_of_the_loader(plan):
    live = stream(7)
    for mine, theirs in zip(stream(7, features_on="device", **plan), live, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_waveforms_are_augmented_on_the_device_in_training_alone_and_alike_for_any_workers():
    workload = dataclasses.replace(points(), augment_waveform=add_noise)
    options = {"device": "cpu", "progress": False}
    plan = Plan(features_on="device", log_every=1)
    augmented = fit(workload, plan=plan, **options)
    assert augmented.loss != fit(points(), plan=plan, **options).loss
    assert fit(workload, plan=dataclasses.replace(plan, workers=2), **options).loss == augmented.loss
    plain, altered = (BatchStream(one, one.test, plan, 16, None, CPU).one_pass() for one in (points(), workload))
    assert all(torch.equal(mine[0], theirs[0]) for mine, theirs in zip(plain, altered, strict=True))


def test_waveform_augmentation_that_a_plan_cannot_give_is_said_to_be_skipped():
    workload = dataclasses.replace(points(), augment_waveform=add_noise)
    (fallback,) = fit(workload, plan=Plan(), device="cpu", progress=False).effective.fallbacks
    assert fallback.field == "features_on" and "augment_waveform is skipped" in fallback.why


def test_features_in_a_cache_leave_nothing_for_the_device():
    (fallback,) = resolve(Plan(features_on="device", cache="ram"), this_machine("cpu")).fallbacks
    assert (fallback.field, fallback.got) == ("features_on", "cpu")


# The decoder.


def decode(item, decoder="soundfile"):
    return load(item, 8) + (decoder == "librosa")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_decoder_of_the_plan_reaches_the_workload(workers):
    workload = dataclasses.replace(points(), load=decode, decoders=("librosa",))
    items = workload.train
    plain, other = (
        BatchStream(workload, items, Plan(decoder=name, workers=workers), 16, 0, CPU)
        for name in ("soundfile", "librosa")
    )
    assert torch.equal(plain.next()[0] + 2, other.next()[0])
    plain.close()
    other.close()


def test_a_decoder_that_the_workload_does_not_take_is_refused():
    with pytest.raises(PlanError, match="decoder=librosa is not one that workload points can use: it has soundfile"):
        BatchStream(points(), points().train, Plan(decoder="librosa"), 16, 0, CPU)


# workers="auto".


def slow_load(item):
    time.sleep(0.002)
    return load(item, 8)


def slow_loss(model, batch, recipe):
    time.sleep(0.05)
    return loss(model, batch, recipe)


def test_auto_takes_workers_where_loading_is_what_takes_the_time():
    workload = dataclasses.replace(points(), load=slow_load)
    plan = Plan(workers="auto", log_every=1)
    history = fit(workload, plan=plan, device="cpu", progress=False)
    (fallback,) = history.effective.fallbacks
    assert (fallback.field, fallback.asked) == ("workers", "auto")
    assert history.effective.plan.workers == fallback.got > 0
    assert "gave the shortest steps: none" in fallback.why and "by thread" in fallback.why
    assert f"workers {fallback.got} by {history.effective.plan.worker_kind} gave" in fallback.why
    assert history.loss == fit(points(), plan=Plan(log_every=1), device="cpu", progress=False).loss


def test_auto_takes_no_workers_where_there_is_nothing_to_hide():
    workload = dataclasses.replace(points(), loss=slow_loss)
    history = fit(workload, plan=Plan(workers="auto"), device="cpu", progress=False)
    assert history.effective.plan.workers == 0
    assert "nothing to hide" in history.effective.fallbacks[0].why


def test_auto_leaves_room_in_shared_memory_and_ram():
    free = shutil.disk_usage("/dev/shm").free
    assert most_processes(free // 10, 0) == 5
    assert most_processes(free, 0) == 0
    assert most_processes(0, usable_ram_bytes() // 4) == 2


def test_signals_to_a_loader_without_processes_go_nowhere():
    batches = BatchStream(points(), points().train, Plan(), 16, 0, CPU)
    batches.next()
    batches.signal_workers(signal.SIGSTOP)
    assert batches.pids == []
