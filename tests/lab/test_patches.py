"""The patch of a tuned script: git applies it, the script runs to its end with it, and what it changes is in force."""

import contextlib
import importlib
import os
import runpy
import subprocess
import sys

import pytest
import torch
from processes import ROOT
from torch import nn

from speedkit.lab.script.patches import patch_of
from speedkit.lab.script.places import recorded_places
from speedkit.machine import this_machine
from speedkit.train.process_state import process_state_kept

MAIN = '''#!/usr/bin/env python3
"""Learns classes of pictures, called é."""
from __future__ import annotations
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader

class Pictures(torch.utils.data.Dataset):
    made = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        Pictures.made += 1
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 3), nn.Linear(288, 2)

    def forward(self, inputs):
        return {"logits": self.head(self.features(inputs).flatten(1))}

def loaders(size, **more):
    return DataLoader(
        Pictures(),
        batch_size=size,  # a comment, with ) and ,
        **more,
    )

def main():
    device = torch.device("cpu")
    net = Net().to(device)
    loader = loaders(4)
    if loader:
        optimizer = torch.optim.AdamW((net.parameters()), lr=1e-3)
    for epoch in range(2):
        for i, data in enumerate(loader):
            inputs, labels = data[0].to(device), data[1].to(device)
            loss = nn.functional.cross_entropy(net(inputs)["logits"], labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert loss.dtype == torch.float32
    return {"loader": loader, "optimizer": optimizer, "model": net}

if __name__ == "__main__":
    parts = main()
'''
LEVEL = """import torch.nn.functional as F
from torch import nn, optim, utils, randn, float32
class Pictures:
	made = 0
	def __len__(self): return 8
	def __getitem__(self, index):
		Pictures.made += 1
		return {"x": randn(3, 8, 8), "y": index % 2}
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2))
if net: pass; optimizer = optim.SGD(net.parameters(), 0.1, foreach=True)
loader = utils.data.DataLoader(Pictures(), 4, True, None, None, 0)
for batch in loader:
	batch = {name: value.to("cpu:0") for name, value in batch.items()}
	loss = F.cross_entropy(net(batch["x"]), batch["y"])
	optimizer.zero_grad(False), loss.backward(), optimizer.step()
	optimizer.zero_grad(False)
assert loss.dtype == float32
parts = {"loader": loader, "optimizer": optimizer, "model": net}""".replace("\n", "\r\n")
TRAINER = """import torch
from torch.utils import data
class Loader(data.DataLoader):
    def __init__(self, dataset):
        options = {"batch_size": 4}
        super().__init__(dataset, **options)

def copied(batch, device):
    return [leaf.to(device) for leaf in batch]

class Trainer:
    def __init__(self, model, dataset):
        self.model, self.loader = model, Loader(dataset)
        self.optimizer = self.build(torch.optim.Adam)

    def build(self, kind):
        settings = {"lr": 1e-3}
        return kind(self.model.parameters(), **settings)

    def fit(self):
        for batch in self.loader:
            inputs, labels = copied(batch, "cpu")
            loss = torch.nn.functional.cross_entropy(self.model(inputs), labels)
            loss.backward()
            self.optimizer.step()
            self.model.zero_grad(set_to_none=False)
        assert loss.dtype == torch.float32
"""
TWO_FILES = """
import torch
from torch import nn
from trainer import Trainer

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)
    def forward(self, x):
        return x + self.layer(x)

class Pictures(torch.utils.data.TensorDataset):
    made = 0
    def __getitem__(self, index):
        Pictures.made += 1
        return super().__getitem__(index)

net = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(192, 2))
trainer = Trainer(net, Pictures(torch.randn(8, 3, 8, 8), torch.arange(8) % 2))
trainer.fit()
parts = {"loader": trainer.loader, "optimizer": trainer.optimizer, "model": net}
"""
PICTURES = MAIN[MAIN.index("import torch\n") : MAIN.index("def loaders")]
LIGHTNING = (
    PICTURES
    + """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0])["logits"], batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
trainer = lightning.Trainer(max_epochs=1, **options)
loader = DataLoader(Pictures(), 4)
model = Model()
trainer.fit(model, loader)
parts = {"loader": loader, "optimizer": trainer.optimizers[0], "model": model.net, "trainer": trainer}
"""
)
ACCELERATE = (
    PICTURES
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = Net()
loader = DataLoader(Pictures(), 4)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for inputs, labels in loader:
    accelerator.backward(nn.functional.cross_entropy(net(inputs)["logits"], labels))
    optimizer.step(), optimizer.zero_grad()
parts = {"loader": loader, "optimizer": optimizer.optimizer, "model": net, "accelerator": accelerator}
"""
)
HUGGING_FACE = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": torch.arange(16) + index % 50, "labels": index % 2}

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
arguments = TrainingArguments("out", per_device_train_batch_size=4, max_steps=2, optim="adamw_torch", **options)
model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
trainer = Trainer(model, arguments, train_dataset=Texts())
trainer.train()
parts = {"loader": trainer.get_train_dataloader(), "optimizer": trainer.optimizer.optimizer, "model": model}
parts["trainer"] = trainer
"""
FILES = {
    "main": ("PyTorch", {"train.py": MAIN}),
    "tabs": ("PyTorch", {"my train.py": LEVEL}),
    "two files": ("PyTorch", {"examples/train.py": TWO_FILES, "examples/trainer.py": TRAINER}),
    "lightning": ("Lightning", {"train.py": LIGHTNING}),
    "accelerate": ("Accelerate", {"train.py": ACCELERATE}),
    "transformers": ("Hugging Face", {"train.py": HUGGING_FACE}),
}


class Run:
    """What a script leaves behind, and the number formats that its layers gave."""

    def __init__(self, script):
        self.formats = set()
        hook = nn.modules.module.register_module_forward_hook(self.note)
        try:
            names = runpy.run_path(str(script), run_name="__main__")
        finally:
            hook.remove()
        self.parts = names["parts"]
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = None  # collected with the script's classes, its workers would be waited for: 5 s
        self.made = getattr(names.get("Pictures"), "made", None)

    def note(self, module, inputs, output):
        if isinstance(module, nn.Linear | nn.Conv2d):
            self.formats.add(output.dtype)

    def __getattr__(self, name):
        return self.parts[name]


def is_compiled(module):
    forward = getattr(module.forward, "func", module.forward)
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def compiled(run):
    return is_compiled(run.model) or hasattr(run.model, "_orig_mod") or run.trainer.args.torch_compile


def pinned(run):
    return run.loader.pin_memory or run.trainer.args.use_cpu  # where Hugging Face does not pin


CHANGES = {  # the fields, and whether they are in force in what a run left behind
    "workers": ({"workers": 1, "persistent_workers": True}, lambda run: run.loader.num_workers == 1),
    "persistent_workers": ({"workers": 1, "persistent_workers": True}, lambda run: run.loader.persistent_workers),
    "pin_memory": ({"pin_memory": True}, pinned),
    "fused_optimizer": ({"fused_optimizer": True}, lambda run: run.optimizer.defaults["fused"]),
    "channels_last": ({"channels_last": True}, lambda run: is_channels_last(run.model)),
    "precision": ({"precision": "bf16"}, lambda run: torch.bfloat16 in run.formats),
    "compile": ({"compile": "default"}, compiled),
    "threads": ({"threads": 3}, lambda run: torch.get_num_threads() == 3),
    "attention": ({"attention": "math"}, lambda run: not torch.backends.cuda.flash_sdp_enabled()),
    "cudnn_benchmark": ({"cudnn_benchmark": True}, lambda run: torch.backends.cudnn.benchmark),
    "cache": ({"cache": "ram"}, lambda run: type(run.loader.dataset).__name__ == "Kept"),
    "set_to_none": ({"set_to_none": True}, lambda run: next(run.model.parameters()).grad is None),
}
NOT_PLACED = {
    "two files": {"pin_memory"},  # whose copies are in a function
    "lightning": {"set_to_none"},
    "accelerate": {"set_to_none"},
    "transformers": {"set_to_none", "cache"},
}


def is_channels_last(model):
    weights = [weight for weight in model.parameters() if weight.ndim == 4]
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Write the files of a name into a git repository of its own; return the script."""
    threads = torch.get_num_threads()

    def write(name):
        _, files = FILES[name]
        for path, source in files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(source.encode())
        script = tmp_path / next(iter(files))
        monkeypatch.syspath_prepend(str(script.parent))
        git(tmp_path, "init", "-q")
        return script

    monkeypatch.chdir(tmp_path)
    variables = set(os.environ)
    with process_state_kept(this_machine("cpu").device), torch.compiler.set_stance("force_eager"):
        yield write
    torch.set_num_threads(threads)
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    forget_script(variables)


def forget_script(variables=()):
    """Forget the script's own modules, and what Accelerate keeps for the process."""
    sys.modules.pop("trainer", None)
    importlib.invalidate_caches()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    for name in set(os.environ) - set(variables) if variables else ():
        del os.environ[name]


def git(folder, *words, code=0):
    result = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    assert (result.returncode == 0) == (code == 0), result.stderr
    return result.stdout


def made_patch(script, fields, run, places, framework="PyTorch"):
    loader = run.loader if hasattr(run.loader, "dataset") else None
    return patch_of(script, fields, framework, places, optimizers=[run.optimizer], loader=loader, models=[run.model])


def patched(script, name, fields):
    """Run a script, patch it, and run it again; return the patch and the second run."""
    with recorded_places(script.parent) as places:
        run = Run(script)
    forget_script()
    framework, files = FILES[name]
    patch = made_patch(script, fields, run, places, framework=framework)
    (patch.root / "tune.diff").write_bytes(patch.diff)
    if patch.diff:
        git(patch.root, "apply", "tune.diff")
        git(patch.root, "apply", "tune.diff", code=1)
    before = {path: (patch.root / path).read_bytes() for path in files}
    assert all(before[path] != source.encode() for path, source in files.items()) or len(files) > 1 or not patch.diff
    return patch, Run(script)


IN_FRAMEWORKS = [pytest.param(name, marks=pytest.mark.slow) for name in ("lightning", "accelerate", "transformers")]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["main", "tabs", "two files", *IN_FRAMEWORKS])
def test_a_patched_script_runs_to_its_end_with_each_change_in_force(name, change, scripts):
    if FILES[name][0] != "PyTorch":
        pytest.importorskip(name)
    fields, in_force = CHANGES[change]
    patch, run = patched(scripts(name), name, fields)
    placed = change not in NOT_PLACED.get(name, ())
    assert [line for line in patch.by_hand if change not in line or placed] == []
    assert bool(patch.by_hand) != placed and (in_force(run) or (not placed and not patch.diff))


@pytest.mark.parametrize("name", ["main", "tabs", "two files", *IN_FRAMEWORKS])
def test_all_changes_go_together(name, scripts):
    if FILES[name][0] != "PyTorch":
        pytest.importorskip(name)
    fields = {field: value for change, _ in CHANGES.values() for field, value in change.items()}
    patch, run = patched(scripts(name), name, fields)
    unplaced = NOT_PLACED.get(name, set())
    assert {line.partition("=")[0] for line in patch.by_hand} == unplaced
    wrong = [change for change, (_, in_force) in CHANGES.items() if change not in unplaced and not in_force(run)]
    assert wrong == [], patch.diff.decode()


ODD = """#!/usr/bin/env python
# a script
import os
os.environ["SEEN"] = "1"
import torch as t, copy
from torch.utils.data import DataLoader
def build(kind):
    if kind == 0:
        pass
    elif (made := t.optim.Adam(net.parameters())):
        return made
torch_threads = t.set_num_threads(2)
net = t.nn.Sequential(t.nn.Linear(4, 4))
optimizer = build(1)
data, options = [t.randn(4) for _ in range(8)], {}
loader = LOADER
for batch in loader:
    net(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()
twin = copy.deepcopy(net)
for weight in twin.parameters():
    weight.data.zero_()
assert not twin(batch).any() and net(batch).any(), "a copy has weights of its own"
parts = {"loader": loader, "optimizer": optimizer, "model": net, "copy": twin}
"""
LOADER = "DataLoader(data, 4)"
UNPLACED = [
    ("list(map(DataLoader, [data]))[0]", {"workers": 1}, "no call of a DataLoader"),
    ("DataLoader(*[data, 4])", {"workers": 1}, "*[data, 4] in line 16 of train.py may hold num_workers"),
    ("DataLoader(data, 4, **dict(options))", {"workers": 1}, "**dict(options) in line 16"),
    ("DataLoader(data, 4, **options)#", {"cache": "disk"}, ""),
    ("DataLoader(data, 4, **options)", {"workers": 1}, ""),
    ("DataLoader(data, 4, **options) if 'num_workers' else 0", {"workers": 1}, "**options in line 16"),
    ("[t.stack(data)]", {"workers": 1}, "takes its batches from no DataLoader"),
    (LOADER, {"pin_memory": True}, "non_blocking=True, by hand"),
    (LOADER, {"precision": "fp16"}, "it is no one line. By hand: with torch.autocast"),
    (LOADER, {"allocator": "keep"}, "PyTorch has no words for it. By hand: start with MALLOC"),
    (LOADER, {"set_to_none": True}, "no zero_grad is called"),
    (f"{LOADER}; net.forward = net.forward", {"precision": "bf16"}, "the forward of the Sequential is its own"),
    (f"{LOADER}; n = len([loader.dataset.append])", {"cache": "ram"}, "reads an attribute of loader.dataset"),
]


@pytest.mark.parametrize(("loader", "fields", "why"), UNPLACED)
def test_what_has_no_place_is_left_to_the_author_with_the_reason(loader, fields, why, tmp_path, monkeypatch):
    script = odd_script(tmp_path, monkeypatch, loader)
    with recorded_places(tmp_path) as places:
        run = Run(script)
    patch = made_patch(script, fields, run, places)
    assert len(patch.by_hand) == bool(why) and all(why in line for line in patch.by_hand), patch.by_hand
    assert bool(patch.diff) == (not why or "pin_memory" in fields)


def odd_script(folder, monkeypatch, loader=LOADER, encoding="utf-8"):
    source = ODD.replace("LOADER", loader)
    if encoding != "utf-8":
        source = source.replace("a script", f"-*- coding: {encoding} -*-").replace("os.environ", "é = 1; os.environ")
    monkeypatch.chdir(folder)
    (folder / "train.py").write_bytes(source.encode(encoding))
    return folder / "train.py"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_all_else_stays_byte_for_byte_and_gnu_patch_applies_it_too(encoding, tmp_path, monkeypatch):
    script = odd_script(tmp_path, monkeypatch, encoding=encoding)
    before = script.read_bytes()
    fields = {"fused_optimizer": True, "precision": "bf16", "compile": "default", "threads": 1, "channels_last": True}
    with process_state_kept(this_machine("cpu").device), torch.compiler.set_stance("force_eager"):
        with recorded_places(tmp_path) as places:
            run = Run(script)
        patch = made_patch(script, fields, run, places)
        (tmp_path / "tune.diff").write_bytes(patch.diff)
        subprocess.run(["patch", "-p1", "-i", "tune.diff"], cwd=patch.root, check=True, capture_output=True)
        again = Run(script)
        threads = torch.get_num_threads()
        inputs = torch.randn(4, 4)
        plain = nn.functional.linear(inputs, *again.model[0].parameters())
        assert torch.equal(again.model.eval()(inputs), plain), "an evaluation stays as it is"
        assert not torch.equal(again.model.train()(inputs), plain)
    after = script.read_bytes().splitlines(keepends=True)
    gone = [line for line in before.splitlines(keepends=True) if line not in after]
    assert [line.decode().strip() for line in gone] == ["elif (made := t.optim.Adam(net.parameters())):"]
    assert after[:2] == before.splitlines(keepends=True)[:2] and patch.by_hand == []
    assert again.formats == {torch.bfloat16} and again.optimizer.defaults["fused"] and threads == 1
    assert is_compiled(again.model) and list(again.model.state_dict()) == list(run.model.state_dict())


@pytest.mark.slow  # it compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("precision", ["default", "bf16"])
def test_what_is_compiled_is_the_whole_model_whose_copies_have_weights_of_their_own(
    mode, precision, tmp_path, monkeypatch
):
    script = odd_script(tmp_path, monkeypatch)
    with recorded_places(tmp_path) as places:
        run = Run(script)
    patch = made_patch(script, {"compile": mode, "precision": precision}, run, places)
    (tmp_path / "tune.diff").write_bytes(patch.diff)
    git(tmp_path, "apply", "tune.diff")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    again = Run(script)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["calls_captured"] > 0 and not counters["graph_break"]
    assert again.model.state_dict().keys() == run.model.state_dict().keys()


LIBRARY = """
from transformers import HfArgumentParser
[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu",
    "--max_steps", "2", "--save_strategy", "no", "--report_to", "none"])
"""
LIGHTNING_CLIPS = LIGHTNING.replace("max_epochs=1", "max_epochs=1, gradient_clip_val=1.0")
MADE_BY_LIBRARY = HUGGING_FACE.replace(HUGGING_FACE.splitlines()[13], LIBRARY)
REFUSED = [
    ("lightning", LIGHTNING_CLIPS, "fused_optimizer=True: not in the patch, for beside mixed precision Lightning"),
    ("transformers", MADE_BY_LIBRARY, "a library makes the TrainingArguments, called in line 16 of train.py"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source", "why"), REFUSED)
def test_what_a_framework_refuses_or_makes_itself_is_left_to_the_author(name, source, why, scripts, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setitem(FILES, name, (FILES[name][0], {"train.py": source}))
    patch, run = patched(scripts(name), name, {"fused_optimizer": True, "precision": "bf16"})
    assert why in patch.by_hand[0] and len(patch.by_hand) == (1 if name == "lightning" else 2)
    assert (torch.bfloat16 in run.formats) == (name == "lightning")


def test_recording_changes_nothing_that_is_learned_and_leaves_nothing_behind(scripts):
    script = scripts("main")
    weights = []
    for recording in (contextlib.nullcontext(), recorded_places(script.parent)):
        torch.manual_seed(0)
        with recording:
            weights.append(nn.utils.parameters_to_vector(Run(script).model.parameters()))
    assert torch.equal(*weights)
    before = [torch.utils.data.DataLoader.__init__, torch.optim.Optimizer.__init__, nn.Module.zero_grad]
    finders = list(sys.meta_path)
    with recorded_places(ROOT) as places:
        torch.optim.SGD([torch.zeros(1)], 0.1)
    assert [torch.utils.data.DataLoader.__init__, torch.optim.Optimizer.__init__, nn.Module.zero_grad] == before
    assert sys.meta_path == finders and [place.kind for place in places] == ["Optimizer"]
