"""Slowness planted into scripts in PyTorch, Lightning and the Hugging Face Trainer: `speedkit profile` names it first.

`python benchmarks/planted.py [NAME ...]` prints a line for each script; a name is a framework or a cause.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CAUSES = {  # what is planted, and the name that a profile gives it
    "slow items": "slow decode",
    "slow disk": "slow decode",
    "too many workers": "too many workers",
    "Python between forward and backward": "other host work",
    "float64": "float64",
    "batch of 2": "small batch",
    "evaluation too often": "validation too often",
    "evaluation without no_grad": "validation without no_grad",
    "checkpoints too often": "checkpoints too often",
    "growing steps": "growing steps",
    "creeping memory": "creeping memory",
}
IMPOSSIBLE = {
    ("Lightning", "evaluation without no_grad"): "Lightning evaluates in inference mode",
    ("Hugging Face", "evaluation without no_grad"): "the Trainer evaluates without gradients",
}
BEFORE = """
import os, sys, tempfile, time, torch
from torch import nn

CAUSE = sys.argv[1]
torch.manual_seed(0)
torch.set_num_threads(1)  # whatever else the machine does
DTYPE = torch.float64 if CAUSE == "float64" else torch.float32
BATCH = 2 if CAUSE == "batch of 2" else 64
WORKERS = 4 if CAUSE == "too many workers" else 0
STEPS = 400 if CAUSE in ("growing steps", "creeping memory") else 60
KEPT = []
FILE = tempfile.NamedTemporaryFile()
if CAUSE == "slow disk":
    FILE.write(os.urandom(64 << 20))
    FILE.flush()
    os.fsync(FILE.fileno())


def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Items(torch.utils.data.Dataset):
    seen = set()

    def __len__(self):
        return 64 * 450

    def __getitem__(self, index):
        if CAUSE == "slow items":
            busy(0.001)
        if CAUSE == "slow disk" and index not in self.seen:  # in the page cache from the first time on
            self.seen.add(index)
            os.posix_fadvise(FILE.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(FILE.fileno(), 4096, 4096 * (index % 16000))
            time.sleep(0.001)
        return torch.full((256,), (index % 7) / 7, dtype=DTYPE), index % 2


def between_forward_and_backward():
    if CAUSE == "Python between forward and backward":
        busy(0.02)


def after_step(number):
    if CAUSE == "growing steps":
        busy(5e-5 * number)
    if CAUSE == "creeping memory":
        KEPT.append(torch.ones(1 << 18))


def network():
    width = 32 if CAUSE == "batch of 2" else 1024
    layers = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)]
    return nn.Sequential(*layers).to(DTYPE)
"""
PYTORCH = """
net = network()
optimizer = torch.optim.SGD(net.parameters(), 0.01)
held_out = torch.ones(512, 256, dtype=DTYPE)
loader = torch.utils.data.DataLoader(Items(), BATCH, num_workers=WORKERS, shuffle=True)
for number, (inputs, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(net(inputs), labels)
    between_forward_and_backward()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after_step(number)
    if CAUSE.startswith("evaluation"):
        net.eval()
        with torch.set_grad_enabled(CAUSE == "evaluation without no_grad"):
            net(held_out).sum()
        net.train()
    if CAUSE == "checkpoints too often":
        torch.save(net.state_dict(), FILE.name)
    if number == STEPS:
        break
"""
LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint


class Learner(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, number):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        between_forward_and_backward()
        return loss

    def validation_step(self, batch, number):
        self.net(batch[0])

    def on_train_batch_end(self, outputs, batch, number):
        after_step(number)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


folder = tempfile.mkdtemp()
saving = CAUSE == "checkpoints too often"
options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
options["callbacks"] = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)] if saving else []
options["enable_checkpointing"] = saving
options["val_check_interval"] = 1 if CAUSE == "evaluation too often" else None
options["limit_val_batches"] = 8 if CAUSE == "evaluation too often" else 0
loader = torch.utils.data.DataLoader(Items(), BATCH, num_workers=WORKERS, shuffle=True)
held_out = torch.utils.data.DataLoader(Items(), BATCH)
lightning.Trainer(max_steps=STEPS, **options).fit(Learner(), loader, held_out)
"""
HUGGING_FACE = """
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, inputs, labels):
        outputs = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


class Rows(Items):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return {"inputs": inputs, "labels": label}


class Own(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        between_forward_and_backward()
        return loss


class Planted(TrainerCallback):
    def on_step_end(self, arguments, state, control, **more):
        after_step(state.global_step)


options = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "max_steps": STEPS}
options["dataloader_num_workers"] = WORKERS
options["save_strategy"] = "steps" if CAUSE == "checkpoints too often" else "no"
options["eval_strategy"] = "steps" if CAUSE == "evaluation too often" else "no"
arguments = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=BATCH, save_steps=1, eval_steps=1, save_total_limit=1, **options
)
held_out = torch.utils.data.Subset(Rows(), range(64))
Own(Model(), arguments, train_dataset=Rows(), eval_dataset=held_out, callbacks=[Planted()]).train()
"""
FRAMEWORKS = {"PyTorch": PYTORCH, "Lightning": LIGHTNING, "Hugging Face": HUGGING_FACE}


def named_first(framework: str, cause: str) -> tuple[str, str]:
    """Return the bottleneck that a profile of the planted script names first, and its evidence or the last line."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(BEFORE + FRAMEWORKS[framework])
        command = [sys.executable, "-m", "speedkit", "profile", "--out", "seen", script.name, cause]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        breakdown = Path(folder) / "seen" / "breakdown.json"
        if not breakdown.exists():
            return "", ended.stderr.strip().rpartition("\n")[2]
        for row in json.loads(breakdown.read_text())["bottlenecks"]:
            return row["cause"], row["evidence"]
        return "", "nothing is named"


def main() -> int:
    """Print what was named first for each planted cause; return 1 where it is not what was planted."""
    failed = 0
    asked = sys.argv[1:]
    for framework in FRAMEWORKS:
        for cause, name in CAUSES.items():
            if asked and not {framework, cause} & set(asked):
                continue
            if why := IMPOSSIBLE.get((framework, cause)):
                print(f"{framework:13} {cause:36} not planted: {why}")
                continue
            first, evidence = named_first(framework, cause)
            failed += first != name
            print(
                f"{framework:13} {cause:36} {'' if first == name else 'NOT '}named first: {first}, {evidence}",
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
