"""`speedkit tune SCRIPT`: scripts run as Python would run them, planted costs are found, and nothing is left behind."""

import contextlib
import functools
import json
import queue
import threading
import time

import psutil
import pytest
import torch
from processes import python
from slow_scripts import ACCELERATE, FORKS, LIGHTNING, SECOND_LOOP, SLOW_DATA
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from speedkit.errors import UsageError
from speedkit.lab.frameworks import change_in_words
from speedkit.lab.script.bench import Bench
from speedkit.lab.script.feed import Feed
from speedkit.lab.script.forward import Forward, why_not_around
from speedkit.lab.script.handover import Handover, NewRun, Over
from speedkit.lab.script.learning import AHEAD, STEPS, Learning
from speedkit.lab.script.profile import ScriptProfile
from speedkit.lab.script.switches import Attention, Loop
from speedkit.lab.script.tune import tune_script
from speedkit.lab.script.tuning import Tuning
from speedkit.lab.script.updates import Gradients, MemoryFormat, Update
from speedkit.lab.script.words import in_sentences
from speedkit.machine import this_machine
from speedkit.measure.profile import LoopProfile
from speedkit.measure.timeline import DATA, OPTIMIZER

# Slower, and the same each time.
CLIPS = SLOW_DATA.replace("0.002", "0.01").replace("torch.randn(32)", "torch.full((32,), index % 7.0)")
SLOW = f"""{CLIPS}
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(net.parameters())
print("begins", sys.argv[1:], sys.stdin.read())
for _ in range(3):
    for inputs, labels in torch.utils.data.DataLoader(Clips(), 8):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
torch.save(net.state_dict(), "weights.pt")
torch.load("weights.pt")
"""
STEPS_OF = "import torch\nw = torch.nn.Linear(4, 4)\no = torch.optim.SGD(w.parameters(), 0.1)\nfor i in range(400):\n"
STEPS_OF += "    w(torch.randn(2, 4)).sum().backward(), o.step(), o.zero_grad()\n"
BY_ITSELF = STEPS_OF.replace("o.step()", "w.weight.data.sub_(0.1 * w.weight.grad)")
TUNE = ("-m", "speedkit", "tune", "--out", "seen", "--budget", "60s")


def run(folder, source, *command, **variables):
    (folder / "script.py").write_text(source)
    return python(*command, "script.py", "--its", "own", folder=folder, **variables)


@pytest.mark.slow
def test_a_slow_loader_is_told_in_a_script_that_is_run_again_silently_and_saves_nothing(tmp_path):
    result = run(tmp_path, SLOW, *TUNE)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "seen" / "tune.json").read_text())
    rows = {row["optimization"]: row for row in record["optimizations"]}
    assert record["runs"] > 1 and result.stdout.count("begins ['--its', 'own']") == 1
    assert not (tmp_path / "weights.pt").exists() and result.stderr.count("--keep saves") == 1
    assert rows["cache"]["ratio"] > 3 and rows["cache"]["decision"] in ("faster", "undecided")  # as the machine is busy
    assert rows["cache"]["kept"] == ("cache" in record["plan"]) and "zero_grad" in rows
    assert bool(record["in_words"]) == bool(record["plan"]) == ("In PyTorch:" in result.stdout)
    assert rows["channels_last"]["why"] == "the model has no two-dimensional convolution"
    assert "script.py" in result.stdout
    assert "script.py" in (tmp_path / "seen" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (STEPS_OF.replace("400", "40") + "raise ValueError('planted')", 1, ("line 6", "ValueError: planted")),
        (
            STEPS_OF.replace("400", "40") + "import os\nos.chdir('/')\nraise ValueError('planted')",
            1,
            ("line 8", "ValueError: planted"),
        ),
        (STEPS_OF.replace("400", "1") + "raise SystemExit(3)", 3, ("script.py made 1 optimizer steps",)),
        (STEPS_OF + "with open('w.pt', 'wb') as f: torch.save({}, f)\ntorch.load('w.pt')", 0, ("misses", "EOFError")),
        (STEPS_OF.replace("400", "15"), 0, ("script.py made 15 steps, too few to look at",)),
        (BY_ITSELF + "raise SystemExit(4)", 4, ("script.py makes 400 backward passes", "p.data -= ...")),
        (STEPS_OF.replace("400", "35") + "import os; os._exit(7)", 7, ()),
    ],
    ids=[
        "fails",
        "fails elsewhere",
        "one step",
        "weights of its own",
        "few steps",
        "updates by itself",
        "leaves at once",
    ],
)
def test_a_script_that_fails_or_exits_does_so_as_ever(source, code, words, tmp_path):
    result = run(tmp_path, source, *TUNE)
    assert result.returncode == code and all(word in result.stderr for word in words), result.stderr
    assert "speedkit/" not in result.stderr and "runpy" not in result.stderr
    assert (tmp_path / "seen" / "tune.json").exists() == ("report.html" in result.stdout)


@pytest.mark.slow
def test_a_step_that_fails_under_a_switch_only_is_told_and_the_script_is_run_again(tmp_path):
    refuses = "        assert not optimizer.param_groups[0].get('fused'), 'planted'\n        optimizer.step()"
    result = run(tmp_path, SLOW.replace("        optimizer.step()", refuses).replace("0.01", "0.0"), *TUNE)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "seen" / "tune.json").read_text())
    [row] = [row for row in record["optimizations"] if row["optimization"] == "host_syncs"]
    assert row["why"] == "it failed: AssertionError: planted" and not row["kept"]
    assert "fused_optimizer" not in record["plan"]


@pytest.mark.slow
def test_a_script_that_forks_prints_otherwise_and_has_a_second_loop_is_tuned(tmp_path):
    result = run(tmp_path, FORKS + STEPS_OF + SECOND_LOOP, *TUNE, "--steps", "700")
    assert result.returncode == 0 and "mine" not in result.stdout, result.stderr
    record = json.loads((tmp_path / "seen" / "tune.json").read_text())
    assert record["steps"] <= 700 and result.stdout.count("script.py") >= 1
    assert {row["optimization"] for row in record["optimizations"]} >= {"workers", "precision", "compile"}


WANDB = """
import os
session = None  # which reads the environment where it begins

def init():
    global session
    session = session or os.environ.get("WANDB_MODE", "online")
    return session

def teardown():
    global session
    session = None
"""


@pytest.mark.slow
def test_only_the_first_run_of_a_script_may_report_to_wandb(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "wandb.py").write_text(WANDB)
    begun = "import wandb\nwith open('modes', 'a') as modes: print(wandb.init(), file=modes)\n"
    result = run(tmp_path, begun + STEPS_OF.replace("400", "40"), *TUNE, "--steps", "100")
    assert result.returncode == 0, result.stderr
    first, *others = (tmp_path / "modes").read_text().split()
    assert first == "online" and set(others) == {"offline"}


@pytest.mark.slow
def test_what_cannot_be_tuned_is_refused_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="there is no script"):
        tune_script(tmp_path / "none.py", [], tmp_path / "out", budget_s=1.0)
    (tmp_path / "script.py").write_text(STEPS_OF)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="start it without torchrun"):
        tune_script(tmp_path / "script.py", [], tmp_path / "out", budget_s=1.0)
    for words, refused in (
        (("--seeds", "3", "script.py"), "--seeds is for a workload"),
        (("--keep", "audio"), "--keep is for a script"),
    ):
        result = python("-m", "speedkit", "tune", *words, folder=tmp_path)
        assert result.returncode == 2 and refused in result.stderr and result.stderr.count("\n") == 1


def loop_of(net, optimizer, loader=None):
    """A loop as a profile has found it, without its closer look."""
    return LoopProfile([net], optimizer, loader, compiled=False)


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), float(index))


@pytest.mark.parametrize(
    ("again", "fetched"),
    [
        ({"batch_size": 8}, 0),  # as a script that makes its loader in each epoch
        ({"batch_size": 4}, 10),
        ({"batch_size": 8, "shuffle": True}, 5),
        ({"batch_size": 8, "drop_last": True, "dataset": torch.arange(40)}, 5),
    ],
)
def test_a_loader_made_anew_is_the_loops_own_and_another_is_not(again, fetched):
    net = nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(Items(), 8)
    loaders = {}
    feed = Feed(loop_of(net, torch.optim.SGD(net.parameters()), loader), loaders, this_machine("cpu"))
    made = torch.utils.data.DataLoader(**{"dataset": Items()} | again)
    with feed.installed():
        feed.set({"cache": "ram"})
        batches = iter(made)
        loaders[id(batches)] = made
        assert len(list(batches)) == len(made)
    assert batches._num_yielded == fetched


def test_an_epoch_that_began_before_the_tuning_has_as_many_batches_as_ever():
    net = nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(Items(), 8)
    batches = iter(loader)
    before = [next(batches), next(batches)]
    feed = Feed(loop_of(net, torch.optim.SGD(net.parameters()), loader), {id(batches): loader}, this_machine("cpu"))
    with feed.installed():
        feed.set({"cache": "ram"})
        assert len(before) + len(list(batches)) == len(loader)


def test_another_loader_gives_an_epoch_as_many_batches_and_its_workers_stand_still_between_turns():
    net = nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(Items(), 8)
    loop = loop_of(net, torch.optim.SGD(net.parameters()), loader)
    loaders = {}
    feed = Feed(loop, loaders, this_machine("cpu"))
    with feed.installed():
        for wanted in ({}, {"workers": 2, "persistent_workers": True}, {"cache": "ram"}):
            batches = iter(loader)
            loaders[id(batches)] = loader
            feed.set(wanted)
            assert sorted(row[0].item() for batch in batches for row in batch) == [float(index) for index in range(40)]
        workers = [psutil.Process(process.pid) for process in next(iter(feed.streams.values()))._workers]
        until_s = time.monotonic() + 30
        while {worker.status() for worker in workers} != {psutil.STATUS_STOPPED}:
            assert time.monotonic() < until_s  # a busy machine stops a process when it is its turn
            time.sleep(0.05)
        feed.close()
        psutil.wait_procs(workers, 10)
        assert not any(worker.is_running() for worker in workers)


def test_a_forward_pass_that_fails_under_a_switch_is_made_without_and_told():
    net = nn.Linear(4, 1)
    net._compiled_call_impl = net._call_impl
    forward = Forward(net, loop_of(net, torch.optim.SGD(net.parameters())).timeline)
    assert "the script never calls its model as model(inputs)" in why_not_around([forward])
    expected = net(torch.ones(2, 4))
    assert why_not_around([forward]) == ""

    def broken(*_):
        raise RuntimeError("planted")

    forward.compiled = broken
    assert torch.equal(net(torch.ones(2, 4)), expected) and str(forward.failure) == "planted"
    forward.compiled = None
    forward.contexts["precision"] = lambda: torch.autocast("cpu", torch.bfloat16)
    half = net(torch.ones(2, 4))
    assert half.dtype == torch.float32 and torch.equal(half, half.bfloat16().float())
    with torch.no_grad():
        assert torch.equal(net(torch.ones(2, 4)), expected), "an evaluation stays as it is"
    with pytest.raises(RuntimeError, match="mat1"):
        forward.contexts.clear()
        net(torch.ones(2, 5))


def test_switches_of_updates_leave_what_is_learned_and_are_taken_back():
    weights, states = [], []
    for switched in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
        optimizer = torch.optim.AdamW(net.parameters())
        gradients = Gradients()
        switches = [Update([optimizer]), MemoryFormat([net], [optimizer]), gradients]
        zero_grad = gradients.seen(torch.optim.Optimizer.zero_grad)
        assert [next(switch.candidates())[2] for switch in switches[:2]] == ["", ""]
        for step in range(6):
            zero_grad(optimizer, set_to_none=False)
            net(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            if switched and step in (1, 3):
                for switch in switches:
                    switch.set({switch.fields[0]: True} if step == 1 else {})
        weights.append([weight.detach().clone() for weight in net.parameters()])
        states.append((optimizer.param_groups[0]["fused"], optimizer.defaults["fused"], net[0].weight.stride()))
        assert gradients.asked and next(gradients.candidates())[1] == {"set_to_none": True}
    assert states[0] == states[1]
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*weights, strict=True))


def run_bench(folder, train, tuning):
    """Tune a loop by `tuning`, a function of the bench and what asks it; return what a profile saw of it."""
    handover = Handover(lambda: tuning(bench, handover.ask))
    bench = Bench(handover, lambda: True)
    seen = ScriptProfile(folder, 1e6, stop=False)
    seen.answered = True
    with contextlib.suppress(SystemExit), seen.installed(), bench.installed(seen):
        train()
    if handover.error is not None:
        raise handover.error
    return seen


def test_a_switch_that_cannot_be_undone_leaves_no_other_on(tmp_path):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    threads = torch.get_num_threads()

    def train():
        for _ in range(100):
            net(torch.ones(2, 4)).sum().backward(), optimizer.step(), optimizer.zero_grad()

    def tuning(bench, ask):
        ask(functools.partial(bench.turn, {"fused_optimizer": True, "threads": threads + 1}, 2))
        del optimizer.state

    run_bench(tmp_path, train, tuning)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("order", ["cccccg", "gccccc", "ccg"])
def test_a_step_is_a_round_of_all_optimizers_and_one_that_comes_later_is_told(order, tmp_path):
    nets = {"c": nn.Linear(8, 8), "g": nn.Linear(8, 4), "later": nn.Linear(4, 4)}
    optimizers = {}

    def train():
        for name in ("c", "g"):
            optimizers[name] = torch.optim.SGD(nets[name].parameters(), 0.1)
        for name in 8 * order:
            optimizers[name].step()
        torch.optim.SGD(nets["later"].parameters(), 0.1).step()

    seen = run_bench(tmp_path, train, lambda *_: None)
    assert seen.loop.optimizer is optimizers["g"] and {*map(id, seen.loop.models)} == {id(nets["c"]), id(nets["g"])}
    assert seen.loop.timeline.calls[OPTIMIZER] == 8 * len(order) - len(seen.optimizers)
    assert seen.left_out() == ["steps of other optimizers that came later are not in here: 1"]


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_the_kernels_of_attention_that_a_patch_allows_are_those_that_were_measured(kernel):
    net = nn.Linear(4, 1)
    net._compiled_call_impl = net._call_impl
    profile = loop_of(net, torch.optim.SGD(net.parameters()))
    forward = Forward(net, profile.timeline)
    allowed = []

    def note(*_):
        switches = torch.backends.cuda
        kinds = ("flash", "mem_efficient", "cudnn", "math")
        allowed.append([getattr(switches, f"{kind}_sdp_enabled")() for kind in kinds])

    net.register_forward_hook(note)
    feed = Feed(profile, {}, this_machine("cpu"))
    parts = {"optimizers": [], "operators": {}, "gradients": Gradients(), "compiled": False, "forwards": [forward]}
    Attention(Loop(profile=profile, feed=feed, hardware=feed.hardware, **parts)).set({"attention": kernel})
    net(torch.ones(2, 4))
    forward.contexts.clear()
    with sdpa_kernel([*SDPBackend.__members__.values()][1:]):  # what the lines switch off is switched on again
        exec(change_in_words(f"attention={kernel}", "PyTorch"))
        net(torch.ones(2, 4))
    assert allowed[0] == allowed[1]


def learn(apply_to, *, moving=False, run_steps=5 + 4 * (AHEAD + STEPS)):
    """Drive the test of what is learned in a loop of so many steps; `apply_to` gets the net and what is switched on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    loop = loop_of(net, optimizer)
    feed = Feed(loop, {}, this_machine("cpu"))
    learning = Learning([net], [optimizer], feed, lambda plan: apply_to(net, plan), run_steps=run_steps)
    work = learning.test({"on": True})
    drawn = torch.Generator().manual_seed(1)
    for step in range(run_steps):
        learning.before_step()
        inputs = torch.randn(16, 8, generator=drawn if moving else None)
        loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if learning.losses is not None:
            learning.losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learning.after_step()
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)  # a schedule
        try:
            next(work)
        except StopIteration as end:
            return end.value
    raise AssertionError("it has no end")


def test_learning_the_same_is_told_from_learning_something_else_and_from_what_cannot_be_repeated():
    same = learn(lambda net, plan: None)
    assert same["passed"] and same["losses"] == same["reference"] and len(same["losses"]) == STEPS
    short = learn(lambda net, plan: None, run_steps=40)
    assert short["passed"] and short["losses"] == short["reference"] and len(short["losses"]) == 7
    other = learn(lambda net, plan: net[0].register_forward_hook(lambda *_: 5 + _[2]) if plan else None)
    assert other["tested"] and not other["passed"]
    drawn = learn(lambda net, plan: None, moving=True)
    assert not drawn["tested"] and "cannot be repeated" in drawn["why"]


def test_noise_that_is_drawn_after_a_batch_is_drawn_again_wherever_an_epoch_begins():
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    loader = torch.utils.data.DataLoader(Items(), 8, shuffle=True)  # five batches, whose order is drawn
    loaders = {}
    feed = Feed(loop_of(net, optimizer, loader), loaders, this_machine("cpu"))
    learning = Learning([net], [optimizer], feed, lambda plan: None)
    work = learning.test({})
    with feed.installed():
        while True:
            batches = iter(loader)
            loaders[id(batches)] = loader
            for inputs in batches:
                loss = (net(inputs) - torch.randn(len(inputs), 1)).square().mean()
                if learning.losses is not None:
                    learning.losses.append(loss.detach())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                try:
                    next(work)
                except StopIteration as end:
                    assert end.value["passed"] and end.value["losses"] == end.value["reference"]
                    return


def test_a_tuning_and_a_script_take_turns_and_each_end_reaches_the_other():
    found = queue.SimpleQueue()

    def work():
        yield
        yield
        return threading.current_thread() is threading.main_thread()

    def tuning():
        found.put(handover.ask(work))
        for error in (NewRun, Over):
            with pytest.raises(error):
                handover.ask(work)
            found.put(error)

    handover = Handover(tuning)
    for _ in range(3):
        handover.step_ended()
    assert found.get(timeout=10) is True
    handover.interrupt(NewRun())
    assert found.get(timeout=10) is NewRun
    handover.step_ended()
    handover.close()
    assert found.get(timeout=10) is Over and handover.over and handover.error is None
    done = Handover(lambda: None)
    for _ in range(2):  # also where a script goes on after the first
        with pytest.raises(SystemExit):
            done.step_ended()
    done.to_the_end = True  # a failure that was put down to a switch may be the script's own
    done.step_ended()


def test_turns_hold_all_that_a_loader_has_ready_only_where_the_loop_waits_for_it():
    def steps_of(wait, fields, step_s):
        tuning = Tuning(budget_s=240.0)
        tuning.own = {"workers": 4}
        tuning.step_s = step_s
        tuning.shares = {DATA: wait}
        turns = []

        def turn(plan, *, steps):
            turns.append(steps)
            return steps * step_s

        tuning._turn = turn
        tuning._compare({}, fields, 0.12)
        return min(turns)

    half = {"precision": "bf16"}
    assert steps_of(0.0, half, 0.7) == 1, "20 pairs of more steps do not fit"
    assert steps_of(0.0, half, 0.2) == 2 and steps_of(0.0, half, 0.01) == 8
    assert steps_of(0.1, half, 0.7) == steps_of(0.0, {"cache": "ram"}, 0.7) == 4
    assert steps_of(0.1, half, 0.2) == 8


def test_sentences_tell_what_was_kept_and_what_not_and_the_headline_is_last():
    row = {"change": "precision=bf16", "ratio": 1.5, "low": 1.4, "high": 1.6, "decision": "faster", "kept": True}
    row |= {"why": "faster, and learns the same", "pays_from_step": None}
    late = {**row, "change": "compile=default", "pays_from_step": 1200}
    none = {**row, "change": "channels_last=True", "ratio": None, "kept": False, "why": "there is no such layer"}
    record = {"script": "a.py", "framework": "PyTorch", "runs": 2, "notes": [], "in_words": ["a", "b"]}
    record |= {"optimizations": [row, late, none], "plan": {"precision": "bf16"}, "speedup": row}
    sentences = in_sentences(record)
    assert sentences[0] == "precision=bf16: 1.50× (1.40 to 1.60), kept: faster, and learns the same."
    assert "pays from 1,200 steps on" in sentences[1] and sentences[2] == "channels_last=True: there is no such layer."
    assert sentences[-1] == "A step of a.py is 1.50 times as fast (1.40 to 1.60, 99 %) with precision=bf16."
    nothing = in_sentences(record | {"plan": {}, "optimizations": [none]})
    assert nothing[-1] == "Nothing that was tried makes a.py faster: it stays as it is."


FRAMEWORKS = {
    "lightning": LIGHTNING.replace('"enable_checkpointing": False, ', "").replace("max_steps=45", "max_epochs=3"),
    "accelerate": ACCELERATE,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_in_a_framework_the_same_is_found_and_told_in_its_words(name, tmp_path):
    pytest.importorskip(name)
    result = run(tmp_path, CLIPS + FRAMEWORKS[name], *TUNE)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "seen" / "tune.json").read_text())
    assert record["framework"].lower() == name
    measured = {row["optimization"]: row["ratio"] for row in record["optimizations"]}
    assert measured["cache"] > 1
    assert not list(tmp_path.rglob("*.ckpt"))
