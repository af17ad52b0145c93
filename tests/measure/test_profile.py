"""A loop that is profiled learns what it learns alone; its breakdown has what was planted."""

import contextlib
import copy
import io
import random
import time

import numpy as np
import psutil
import pytest
import torch
from picture import LEFT_BY_MEASURING, differences, picture
from tiny import DEVICES, busy
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.utils.data import DataLoader, TensorDataset

from speedkit.errors import UsageError
from speedkit.measure.growth import Growth
from speedkit.measure.hang import hang_told
from speedkit.measure.profile import profile
from speedkit.measure.timeline import Timeline
from speedkit.measure.warm_up import compilations

MS = 1e-3


class Slow(TensorDataset):
    """Items that take their time, and draw from every random state there is."""

    seconds = 0.0

    def __getitem__(self, index):
        busy(self.seconds)
        inputs, targets = super().__getitem__(index)
        drawn = torch.rand(8) + random.random() + np.random.rand()  # noqa: NPY002
        return inputs + 0.1 * drawn, targets


class Net(nn.Sequential):
    """A model with a forward pass of its own: of PyTorch's modules alone, `compile()` compiles nothing."""

    def forward(self, inputs):
        for layer in self:
            inputs = layer(inputs)
        return inputs


class Loop:
    """A training loop as somebody has it; `wait_s` seconds are planted in the part of each step that is named."""

    def __init__(self, part="", wait_s=0.0, device="cpu", items=32 * 8):
        torch.manual_seed(0)
        self.part, self.wait_s, self.device = part, wait_s, device
        self.model = Net(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        data = Slow(torch.randn(items, 8), torch.randint(0, 2, (items,)))
        data.seconds = wait_s / 8 if part == "data wait" else 0.0
        self.loader = DataLoader(data, 8, shuffle=True)
        self.losses = []
        self.evaluate_at = range(1, 10**6) if part == "evaluation" else ()

    def plant(self, part):
        busy(self.wait_s if part == self.part else 0.0)

    def step(self, inputs, targets):
        outputs = self.model(inputs.to(self.device))
        self.plant("forward")
        loss = nn.functional.cross_entropy(outputs, targets.to(self.device))
        loss.register_hook(lambda gradient: self.plant("backward"))
        loss.backward()
        self.losses.append(loss.detach())

    def train(self, accumulate=1, stop=10**9):
        for number, batch in enumerate(self.loader, 1):
            self.step(*batch)
            if number % accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.plant("other host work")
            if number in self.evaluate_at:
                self.evaluate()
            if number == stop:
                break

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(4, 8, device=self.device))
            busy(self.wait_s)
            self.model(torch.ones(4, 8, device=self.device))
        self.model.train()


def profiled(loop, **more):
    return profile(loop.model, loop.optimizer, loop.loader, **({"show": False} | more))


def per_step_s(seen, cause):
    return seen.breakdown.share(cause) * seen.breakdown.step_s


def state(loop):
    """All that a profile changes while it is open, but for what a picture shows."""
    return [
        *map(dict, (loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks)),
        *map(list, (callback_handler.start_callbacks, callback_handler.end_callbacks)),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        dict(vars(loop.model)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["data wait", "forward", "backward", "other host work", "evaluation"])
def test_what_was_planted_is_in_its_row(part, device, capsys):
    """After a forward pass only operators count as forward; in a backward pass a GPU's host does other work."""
    loop = Loop(part, 20 * MS, device)
    with profiled(loop, show=True) as seen:
        loop.train()
    row = "other host work" if part == "forward" or (device == "cuda" and part == "backward") else part
    assert per_step_s(seen, row) > 0.95 * 20 * MS
    breakdown = seen.breakdown
    assert abs(breakdown.share("unexplained")) < 0.05
    assert breakdown.steps == 20 and seen.notes == [] and breakdown.facts.trace.calls > 10
    assert breakdown.facts.trace.steps >= 3
    shown = capsys.readouterr().out
    assert row in shown and "unexplained" in shown
    assert part != "data wait" or (seen.bottlenecks[0]["cause"] == "slow decode" and "slow decode: " in shown)


@pytest.mark.parametrize("device", DEVICES)
def test_profiling_moves_nothing_but_what_the_loop_does(device):
    pictures = []
    alone, loop = Loop(device=device), Loop(device=device)
    for each, block in ((alone, contextlib.nullcontext()), (loop, profiled(loop))):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        with block:
            each.train()
        pictures.append(picture(LEFT_BY_MEASURING))
    assert differences(*pictures) == {}
    assert torch.equal(torch.stack(loop.losses), torch.stack(alone.losses))
    assert all(map(torch.equal, loop.model.parameters(), alone.model.parameters()))


# In a warm-up of 1 and 2 timed steps, these are a timed step, two of the close looks, and what is left alone.
@pytest.mark.parametrize("count", [2, 4, 9])
def test_wherever_the_loop_fails_everything_is_as_it_was_and_what_was_measured_is_told(count, monkeypatch):
    monkeypatch.setattr("speedkit.measure.profile.SKIP", 1)
    loop = Loop()
    train = loop.step

    def step(*batch):
        if len(loop.losses) == count:
            raise ZeroDivisionError("a bad batch")
        train(*batch)

    loop.step = step
    before, process = state(loop), picture(LEFT_BY_MEASURING)
    with pytest.raises(ZeroDivisionError, match="a bad batch"), profiled(loop, steps=2) as seen:
        loop.train()
    assert state(loop) == before
    assert all("random" in name for name in differences(process, picture(LEFT_BY_MEASURING)))
    assert seen.breakdown.steps == min(count - 1, 2) and seen.breakdown.rows[-1]["cause"] == "unexplained"
    assert (seen.notes == []) == (count >= 9) and all(f"made {count} steps" in note for note in seen.notes)


class Slotted:
    """An iterable of somebody's own, to which nothing can be attached."""

    __slots__ = ("batches",)

    def __iter__(self):
        yield from self.batches


def test_a_step_is_the_optimizers_however_many_batches_it_takes_from_whatever_iterable():
    loop, slotted = Loop("forward", 2 * MS, items=64 * 8), Slotted()
    slotted.batches, loop.loader = list(loop.loader), slotted
    with profiled(loop, steps=4) as seen:
        loop.train(accumulate=2)
    assert seen.breakdown.steps == 4 and seen.batches == 64 and seen.notes == []
    assert per_step_s(seen, "other host work") > 0.9 * 2 * 2 * MS
    assert seen.breakdown.facts.batches == 2 and seen.breakdown.facts.items_at_once == 8


def test_a_batch_is_what_the_net_learns_from_and_not_the_one_item_on_which_an_agent_acts():
    loop = Loop()
    learn = loop.step

    def step(inputs, targets):
        loop.model(inputs[:1])  # with gradients, as many scripts do
        learn(inputs, targets)

    loop.step = step
    with profiled(loop, steps=4) as seen:
        loop.train()
    assert seen.breakdown.facts.items_at_once == 8


@pytest.mark.parametrize("part", ["", "evaluation"])
def test_an_evaluation_with_gradients_is_one_that_no_backward_pass_follows(part):
    loop = Loop(part)
    loop.evaluate = lambda: [loop.model.eval()(torch.ones(4, 8)) for _ in range(2)]
    train = loop.step
    loop.step = lambda *batch: (loop.model.train(part == "evaluation"), train(*batch))
    with profiled(loop) as seen:
        loop.train()
    assert seen.breakdown.facts.graphs == (2 * 32 - 1 if part else 0)
    assert any(row["cause"] == "validation without no_grad" for row in seen.bottlenecks) == bool(part)


def test_what_loading_takes_is_that_of_all_batches_of_a_step():
    loop = Loop("data wait", 2 * MS, items=64 * 8)
    with profiled(loop, steps=4) as seen:
        loop.train(accumulate=2)
    assert seen.breakdown.facts.items_s > 2 * 2 * MS


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_are_seen_and_stay_compiled(in_place):
    loop = Loop()
    torch._dynamo.reset()
    before = compilations()
    if in_place:
        loop.model.compile(backend="eager", dynamic=False)
    else:
        loop.model = torch.compile(loop.model, backend="eager", dynamic=False)
    loop.train(stop=1)
    with profiled(loop) as seen:
        loop.train()
    assert compilations() - before == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        loop.train(stop=1)  # still what was compiled, or this would raise
    assert seen.notes == [] and seen.breakdown.share("forward") > 0


@pytest.mark.parametrize("here", [False, True])
def test_lines_that_read_the_device_are_searched_for_unless_the_model_is_compiled(here):
    loop, sums = Loop(), []
    loop.plant = lambda part: sums.append(loop.losses[-1].item()) if part == "other host work" else None
    compiled = torch.compile(loop.model if here else lambda x: x + 1, backend="eager")
    compiled(torch.ones(2, 8))  # another of the same process
    if here:
        loop.model = compiled
    with profiled(loop) as seen:
        loop.train()
    lines = [sync.code for sync in seen.breakdown.facts.syncs]
    assert bool(lines) is not here and all(".item()" in line for line in lines)


def test_a_line_that_breaks_the_graph_of_another_model_of_this_process_is_no_cause_in_this_one():
    broken = torch.compile(lambda x: x + 1 if x.sum() > 0 else x, backend="eager")
    broken(torch.ones(1))
    loop = Loop()
    with profiled(loop) as seen:
        loop.train()
    assert seen.breakdown.facts.broken == ""
    loop.model.register_forward_hook(lambda module, inputs, output: broken(output))
    loop.model = torch.compile(loop.model, backend="eager")
    with profiled(loop) as seen:
        loop.train()
    assert "x.sum() > 0" in seen.breakdown.facts.broken


def test_beside_another_profiler_the_steps_are_timed_all_the_same():
    loop = Loop("other host work", 20 * MS)
    with torch.profiler.profile(acc_events=True), profiled(loop) as seen:
        loop.train()
    assert per_step_s(seen, "other host work") > 0.95 * 20 * MS
    assert "no closer look" in seen.notes[-1]


def test_a_copy_made_inside_is_a_model_like_any_other():
    """Averages of weights are kept in a copy of the model: it must not lead back to the one that is profiled."""
    loop = Loop()
    with profiled(loop) as seen:
        loop.train(stop=2)
        average, calls = copy.deepcopy(loop.model), seen.forwards
        average(torch.ones(1, 8))
    assert seen.forwards == calls


def test_in_a_long_loop_evaluations_are_timed_after_the_close_look_too():
    loop = Loop("none", 20 * MS, items=100 * 8)
    loop.evaluate_at = (60, 80)
    with profiled(loop) as seen:
        loop.train()
        torch.save(torch.zeros(1), io.BytesIO())
        for _ in range(10):
            loop.evaluate()  # once more at the end is not too often
    assert seen.steps == 100 and seen.breakdown.steps == 20 and not seen.notes
    assert "the first, middle and last steps take" in str(seen)
    assert 0.95 * 2 / 100 * 20 * MS < per_step_s(seen, "evaluation") < 5 / 100 * 20 * MS
    assert seen.breakdown.share("checkpoint") == 0


@pytest.mark.parametrize(
    ("longer_s", "taken", "causes"),
    [
        (MS / 100, 0, ["growing steps"]),
        (0.0, 1 << 20, ["creeping memory"]),
        (0.0, 1 << 10, []),
        (-MS / 1000, 0, []),
    ],
)
def test_what_grows_from_the_first_steps_to_the_last_is_named(longer_s, taken, causes, monkeypatch):
    """Steps of 5 ms, with an evaluation among the last."""
    growth = Growth(torch.device("cpu"))
    seconds = {"forward": 0.0, "backward": 0.0}
    for step in range(3000):
        seconds["forward"] += 3 * MS + step * longer_s
        seconds["backward"] += 2 * MS
        monkeypatch.setattr("speedkit.measure.growth.memory_taken", lambda _, now=step * taken: {"a worker": now})
        if step == 2990:
            seconds["evaluation"] = 60.0
        growth.see(step, seconds)
    found = list(growth.bottlenecks(20 * MS))
    assert [row.name for row in found] == causes and len(growth.samples) <= 64
    assert all("forward" in row.change or "a worker takes" in row.evidence for row in found)
    first_s, middle_s, last_s = growth.as_dict()["step_s"]
    expected = [5 * MS + step * longer_s for step in (50, 1500, 2950)]
    assert [first_s, middle_s, last_s] == pytest.approx(expected, rel=0.05)


class Hanging(torch.utils.data.Dataset):
    """Items that do not come before it is told where they are waited for."""

    def __init__(self, told):
        self.told = told

    def __len__(self):
        return 2

    def __getitem__(self, index):
        while not (self.told.exists() and self.told.stat().st_size):
            time.sleep(0.01)
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_where_a_loop_hangs_is_told_once(workers, tmp_path, capfd):
    told = tmp_path / "hang.txt"
    with hang_told(Timeline(), 0.1, told):
        list(DataLoader(Hanging(told), 2, num_workers=workers))
        time.sleep(0.3)
    assert capfd.readouterr().err == told.read_text()
    said = told.read_text()
    assert said.startswith("speedkit: no step for 0 seconds") and "list(DataLoader(Hanging" in said
    assert (", has used" if workers else "It makes the samples [0, 1]") in said


def test_a_loop_that_is_not_the_one_described_is_told_so_and_what_cannot_be_watched_is_refused():
    loop = Loop()
    batch = next(iter(loop.loader))
    with profiled(loop) as seen:
        for _ in range(30):
            loop.step(*batch)
            loop.optimizer.step()
    assert len(seen.notes) == 1 and "no such model or loader" in str(seen)
    for parts, why in (
        ((loop.optimizer, loop.model, loop.loader), "in this order"),
        ((loop.model, loop.optimizer, []), "a list cannot be profiled as a loader"),
    ):
        with pytest.raises(UsageError, match=why), profile(*parts):
            raise AssertionError("nothing to profile")


def test_bottlenecks_are_left_out_with_a_note_where_peaks_would_take_memory_that_is_not_free(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))  # in which no peaks are kept yet
    loop, process = Loop(), psutil.Process()
    with profiled(loop) as seen:
        loop.train()
        monkeypatch.setattr("speedkit.machine.usable_ram_bytes", lambda: process.memory_info().rss + (64 << 20))
    assert "speedkit hardware" in seen.notes[-1] and seen.breakdown.steps == 20
    assert not seen.bottlenecks and not seen.nothing_stands_out and not list(tmp_path.iterdir())
