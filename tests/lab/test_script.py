"""`speedkit profile SCRIPT`: scripts run as Python would run them, learn the same, and the planted cause is named."""

import json
import subprocess
import sys

import pytest
from processes import python
from slow_scripts import ACCELERATE, FORKS, LIGHTNING, SECOND_LOOP, SLOW_DATA

from speedkit.errors import UsageError
from speedkit.lab.script.profile import next_levers
from speedkit.machine import this_machine
from speedkit.measure.profile_report import read_breakdown
from speedkit.plan import Plan

LOOP = """
net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2))
optimizer, losses = torch.optim.AdamW(net.parameters()), []
for inputs, labels in torch.utils.data.DataLoader(Clips(), 8):
    loss = nn.functional.cross_entropy(net(inputs), labels)
    loss.backward(), optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())
if __name__ == "__main__":
    print("losses", losses, "arguments", sys.argv[1:])
"""
HUGGING_FACE = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Texts(Clips):
    def __getitem__(self, index):
        time.sleep(0.005)
        return {"input_ids": torch.arange(16) + index % 50, "labels": index % 2}

sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
arguments = TrainingArguments("out", per_device_train_batch_size=8, max_steps=45, **options)
model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
Trainer(model=model, args=arguments, train_dataset=Texts()).train()
"""
NEW_SHAPES = """
import torch
torch.manual_seed(0)
net = torch.compile(torch.nn.Linear(64, 4), dynamic=False, backend="aot_eager")
torch._dynamo.config.recompile_limit = 100
optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
for step in range(45):
    loss = net(torch.randn(8 + step, 64)).square().mean()
    loss.backward(), optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())
print("losses", losses, "arguments []")
"""
BEFORE_BACKWARD = SLOW_DATA.replace("time.sleep(0.002)", "") + LIGHTNING.replace(
    "return nn.functional.cross_entropy(self.net(batch[0]), batch[1])",
    "loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1]); time.sleep(0.02); return loss",
)
PLANTED = {  # script, cause, framework, what to do about it there
    "loop": (SLOW_DATA + LOOP, "slow decode", "PyTorch", "num_workers="),
    "lightning": (SLOW_DATA + LIGHTNING, "slow decode", "Lightning", "num_workers="),
    "lightning, before backward": (BEFORE_BACKWARD, "other host work", "Lightning", ""),
    "accelerate": (SLOW_DATA + ACCELERATE, "slow decode", "Accelerate", "num_workers="),
    "transformers": (SLOW_DATA + HUGGING_FACE, "slow decode", "Hugging Face", "dataloader_num_workers="),
    "shapes": (NEW_SHAPES, "new shapes", "PyTorch", "batch_sampler"),
}
STEPS = "import torch\nw = torch.nn.Linear(4, 4)\no = torch.optim.SGD(w.parameters(), 0.1)\nfor i in range(40):\n"
STEPS += "    w(torch.randn(2, 4)).sum().backward(), o.step()\n"

BY_ITSELF = STEPS.replace("o.step()", "w.weight.data.sub_(0.1 * w.weight.grad)")


def run(folder, source, *command):
    """Write a script and run it, under `speedkit profile` where that is the `command`; return what came of it."""
    (folder / "script.py").write_text(source)
    return python(*command, "script.py", "--its", "own", folder=folder)


PROFILE = ("-m", "speedkit", "profile", "--out", "seen")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named_first_in_the_words_of_the_framework(name, tmp_path):
    package = name.partition(",")[0]
    if package in ("lightning", "accelerate", "transformers"):
        pytest.importorskip(package)
    source, cause, framework, words = PLANTED[name]
    result = run(tmp_path, source, *PROFILE)
    assert result.returncode == 0, result.stderr
    breakdown = json.loads((tmp_path / "seen" / "breakdown.json").read_text())
    assert breakdown["bottlenecks"][0]["cause"] == cause and breakdown["framework"] == framework
    assert words in breakdown["bottlenecks"][0]["in_words"] and words in result.stdout
    assert breakdown["steps"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("source", [SLOW_DATA + LOOP, NEW_SHAPES], ids=["eager", "compiled"])
def test_a_script_learns_the_same_bits_with_its_own_arguments(source, tmp_path):
    alone, profiled = (run(tmp_path, source, *command).stdout for command in ((), PROFILE))
    assert profiled.startswith(alone) and alone.startswith("losses [")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (STEPS + "raise ValueError('planted')", 1, ("line 6", "ValueError: planted")),
        (STEPS + "import os\nos.chdir('/')\nraise SystemExit(3)", 3, ()),
        (STEPS.replace("40", "1"), 0, ("script.py made 1 optimizer steps",)),
        (BY_ITSELF + "raise SystemExit(4)", 4, ("script.py makes 40 backward passes", "p.data -= ...")),
    ],
    ids=["fails", "exits elsewhere", "one step", "updates by itself"],
)
def test_a_script_that_fails_does_so_as_ever_after_the_breakdown_of_what_ran(source, code, words, tmp_path):
    result = run(tmp_path, source, *PROFILE)
    assert result.returncode == code and all(word in result.stderr for word in words), result.stderr
    assert (tmp_path / "seen" / "breakdown.json").exists() == (source.startswith(STEPS))
    assert "speedkit/" not in result.stderr and "runpy" not in result.stderr


POOL = """
import multiprocessing, time
pool = multiprocessing.get_context("fork").Pool(2)
pool.map_async(time.sleep, [600, 600])
time.sleep(0.5)
pool.terminate()  # which waits until its processes have ended
pool.join()
"""


@pytest.mark.slow
def test_a_busy_machine_is_named_beside_the_answer(tmp_path):
    """Met beside another program: a worker was advised for a core that was not free, and made steps 1.25 as long."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        result = run(tmp_path, STEPS, *PROFILE)
    finally:
        busy.kill()
        busy.wait()
    assert "at work beside it: profile it again on a quiet machine" in result.stdout, result.stderr


@pytest.mark.slow
def test_the_processes_of_a_script_end_when_it_tells_them_to(tmp_path):
    result = run(tmp_path, POOL + STEPS, *PROFILE)
    assert result.returncode == 0 and "breakdown.json" in result.stdout, result.stderr


@pytest.mark.slow
def test_a_script_that_forks_and_leaves_at_once_in_its_second_loop_is_profiled_once(tmp_path):
    result = run(
        tmp_path, "import sys\nprint('read', sys.stdin.read())" + FORKS + STEPS + SECOND_LOOP + "os._exit(7)", *PROFILE
    )
    assert result.returncode == 7 and result.stdout.startswith("read ") and "mine" not in result.stdout
    assert result.stdout.count("20 steps of") == 1 and "came later are not in here: 5" in result.stdout
    assert (tmp_path / "seen" / "breakdown.json").exists() and "too few" not in result.stderr


@pytest.mark.slow
def test_a_first_answer_comes_while_the_script_goes_on_or_ends_it_and_is_held_against_an_older_one(tmp_path):
    old = {"steps": 2, "step_s": 9.0, "rows": [{"cause": "data wait", "seconds": 3.0}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    source = STEPS.replace("40", "80") + "    if i > 70: print('goes on', flush=True)\n"
    result = run(tmp_path, source, *PROFILE)
    assert "while the script goes on: 20 steps" in result.stderr and result.stdout.startswith("goes on")
    stopped = run(tmp_path, source, *PROFILE[:-1], "stopped", "--stop", "--against", "old.json")
    assert stopped.returncode == 0 and "goes on" not in stopped.stdout + stopped.stderr
    assert "data wait                       1500" in stopped.stdout
    with pytest.raises(UsageError, match=r"script.py is no breakdown.json"):
        read_breakdown(tmp_path / "script.py")


RANKS = """
import time, torch
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(40):
    time.sleep(0.02 * rank)
    net(torch.randn(8, 64)).sum().backward(), optimizer.step(), optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_of_ranks_the_one_is_named_that_the_others_wait_for(tmp_path):
    result = run(tmp_path, RANKS, "-m", "torch.distributed.run", "--nproc-per-node", 2, *PROFILE)
    assert result.returncode == 0, result.stderr
    assert "the other ranks wait for rank1" in result.stdout
    breakdowns = [json.loads((tmp_path / "seen" / f"rank{rank}" / "breakdown.json").read_text()) for rank in (0, 1)]
    assert breakdowns[0]["exchange_s"] > 0.01 + breakdowns[1]["exchange_s"]


TWO_NETWORKS = """
import time, torch
from torch import nn
generator, critic = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 1))
critic.register_forward_pre_hook(lambda *_: time.sleep(0.005))
optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in (generator, critic)]
for step in range(80):
    for optimizer, sign in zip(optimizers, (1, -1)):
        (sign * critic(generator(torch.randn(4, 64)))).mean().backward()
        optimizer.step(), optimizer.zero_grad()
"""


ONE_MODULE = f"""{TWO_NETWORKS.partition("for step")[0]}
class Agent(nn.Module):  # which its loop calls by methods of its own
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([generator, critic])

    def learn(self):
        self.parts[1](self.parts[0](torch.randn(4, 64))).mean().backward()

agent = Agent()
optimizer = torch.optim.Adam(agent.parameters())
for step in range(80):
    agent.learn(), optimizer.step(), optimizer.zero_grad()
"""

ACTING = """
import time, torch
agent = torch.nn.Sequential(torch.nn.Linear(8, 2))
agent.register_forward_pre_hook(lambda *_: time.sleep(0.005))
optimizer = torch.optim.Adam(agent.parameters())
for step in range(40):
    with torch.no_grad():  # in training mode
        for _ in range(3):
            agent(torch.randn(1, 8))
    agent(torch.randn(4, 8)).mean().backward()
    optimizer.step(), optimizer.zero_grad()
"""
NETWORKS = {"two optimizers": TWO_NETWORKS, "no forward": ONE_MODULE, "acts without gradients": ACTING}


@pytest.mark.slow
@pytest.mark.parametrize("source", NETWORKS.values(), ids=NETWORKS)
def test_each_network_that_a_loop_calls_counts_as_forward(source, tmp_path):
    result = run(tmp_path, source, *PROFILE)
    assert result.returncode == 0, result.stderr
    breakdown = json.loads((tmp_path / "seen" / "breakdown.json").read_text())
    shares = {row["cause"]: row["share"] for row in breakdown["rows"]}
    assert shares["forward"] > 0.6 > 0.3 > shares["other host work"]


def test_where_nothing_stands_out_the_levers_are_named_that_are_left():
    shares = {"forward": 0.4, "backward": 0.4, "optimizer": 0.2}
    rows = [{"cause": cause, "share": share} for cause, share in shares.items()]
    sentence = next_levers(Plan(), rows, "cpu")
    assert ("precision=bf16" in sentence) == this_machine("cpu").supports("bf16")
    assert "fused_optimizer=True" in sentence and "operators are 100% of a step" in sentence
    python = [*rows, {"cause": "other host work", "share": 0.1}]
    assert next_levers(Plan(), python, "cpu") == sentence, "it does not compute"
    assert "fused_optimizer" not in next_levers(Plan(fused_optimizer=True), rows, "cpu")
