"""A plan in the words of other frameworks: each snippet is run there, and every argument is looked up there."""

import ast
import contextlib
import dataclasses
import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, Dataset

from speedkit.config import settings_of, to_yaml
from speedkit.errors import PlanError
from speedkit.hardware import this_machine
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.show.frameworks import FRAMEWORKS, in_words

RECIPE = Recipe(batch_size=8, epochs=1, clip_norm=1.0, weight_decay=0.0)
# What a GPU's plan says, as far as a CPU can follow: four parts of a batch, and all that is a word or a comment.
GPU = Plan(
    micro_batch=2,
    precision="bf16",
    compile="max-autotune",
    compile_scope="blocks",
    channels_last=True,
    attention="flash",
    checkpointing="blocks",
    fused_optimizer=True,
    workers=1,
    persistent_workers=True,
    prefetch_factor=4,
    prefetch=True,
    bucket=True,
    drop_last=True,
    log_every=3,
    validate_every=2,
    on_nonfinite="skip",
    allocator="expandable",
)
HERE = this_machine("cpu")
PLANS = {
    "baseline": Plan(),
    "careful": resolve(Plan.careful(HERE), HERE).plan,
    "fast": resolve(Plan.fast(HERE), HERE).plan,
    "for a GPU": GPU,
    "fp16": Plan(precision="fp16", fused_optimizer=True, micro_batch=4),
}


class Images(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image, int(image.mean() > 0)


class Named(Images):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"inputs": image, "labels": label}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2))


class Answering(nn.Module):
    """As Hugging Face has it: the model computes its loss."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def follow(name, plan, recipe=RECIPE, **given):
    """Run the snippet of one framework, code to be compiled in eager mode; return what it leaves behind."""
    torch.manual_seed(0)
    model = given.pop("model", Net)()
    blocks = [model[0], model[2]] if isinstance(model, Net) else []
    found = {
        "model": model,
        "dataset": Images(),
        "loss_function": nn.functional.cross_entropy,
        "device": torch.device("cpu"),
        "blocks": blocks,
    } | given
    with torch.compiler.set_stance("force_eager"):
        exec(in_words(plan, recipe)[name], found)
    return found


@pytest.fixture(autouse=True)
def nothing_left_switched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {key: os.environ[key] for key in os.environ}
    switches = torch.backends.cuda
    yield
    for key in os.environ.keys() - before:  # Accelerate's and Lightning's
        del os.environ[key]
    torch.set_float32_matmul_precision("highest")
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(switches, f"enable_{name}_sdp")(True)
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


# ---- each runs where it is installed ----


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plain_pytorch_trains_and_each_part_of_a_batch_weighs_what_it_should(plan):
    before = [weight.detach().clone() for weight in Net().parameters()]
    found = follow("PyTorch", plan)
    assert found["optimizer"].defaults["fused"] == (True if plan.fused_optimizer else None)
    assert found["loader"].num_workers == plan.workers
    assert all(not torch.equal(*both) for both in zip(before, found["model"].parameters(), strict=True))
    whole = follow("PyTorch", dataclasses.replace(plan, micro_batch=None))
    for ours, theirs in zip(found["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 if plan.precision == "default" else 5e-3)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_lightning_trains(plan):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    trainer = follow("Lightning", plan, YourModule=Module)["trainer"]
    assert trainer.global_step == 3, "20 samples in batches of 8"
    # It has no float16 for a CPU, and says so.
    assert trainer.precision == ("32-true" if plan.precision == "default" else "bf16-mixed")
    assert trainer.log_every_n_steps == plan.log_every and trainer.gradient_clip_val == 1.0


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_accelerate_trains(plan):
    pytest.importorskip("accelerate")
    found = follow("Accelerate", plan)
    accelerator = found["accelerator"]
    parts = 1 if plan.micro_batch is None else 8 // plan.micro_batch
    assert accelerator.gradient_accumulation_steps == parts
    assert accelerator.mixed_precision == {"default": "no"}.get(plan.precision, plan.precision)
    assert found["loader"].total_batch_size == 8 // parts


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_hugging_face_trains(plan):
    pytest.importorskip("transformers")
    plan = dataclasses.replace(plan, checkpointing="off", bucket=False)  # these take a model and data of its library
    found = follow("Hugging Face", plan, model=Answering, dataset=Named(), test_dataset=Named())
    with torch.compiler.set_stance("force_eager"):
        found["trainer"].train()
    arguments = found["arguments"]
    assert (arguments.bf16, arguments.fp16) == (plan.precision == "bf16", plan.precision == "fp16")
    assert arguments.train_batch_size * arguments.gradient_accumulation_steps == 8
    assert arguments.dataloader_pin_memory == plan.pin_memory and arguments.max_grad_norm == 1.0
    assert arguments.optim == ("adamw_torch_fused" if plan.fused_optimizer else "adamw_torch")


# Keys of `train_ds`, from NeMo's own configuration files and documentation:
# https://github.com/NVIDIA/NeMo/blob/main/examples/asr/conf/ssl/nest/nest_fast-conformer.yaml
# https://docs.nvidia.com/nemo/speech/nightly/dataloaders.html
TRAIN_DS = {
    "batch_size",
    "num_workers",
    "pin_memory",
    "drop_last",
    "is_tarred",
    "tarred_audio_filepaths",
    "use_lhotse",
    "use_bucketing",
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nemo_reads_a_trainer_a_data_set_and_an_optimizer(plan):
    lightning = pytest.importorskip("lightning")
    found = yaml.safe_load(in_words(plan, RECIPE)["NeMo"])
    assert set(found) == {"trainer", "model"} and set(found["model"]) == {"train_ds", "optim"}
    assert set(found["model"]["train_ds"]) <= TRAIN_DS
    trainer = lightning.Trainer(**found["trainer"], logger=False, enable_checkpointing=False)
    assert trainer.accumulate_grad_batches * found["model"]["train_ds"]["batch_size"] == 8
    optimizer = found["model"]["optim"]
    assert optimizer.pop("name") == "adamw"
    assert torch.optim.AdamW(Net().parameters(), **optimizer).defaults["lr"] == RECIPE.learning_rate


# ---- every field, every value ----

OTHERS = {"boolean": True, "integer": 3}
VALUES = [
    (about.name, value)
    for about in settings_of(Plan).values()
    for value in (*about.choices, *(OTHERS[kind] for kind in about.kinds if kind in OTHERS))
    if value != about.default
]
BESIDE = {"workers": 2, "cache": "ram", "compile": "default"}  # without which some fields mean nothing


def calls(text):
    """Yield the name and the keywords of each call in a snippet."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg for keyword in node.keywords}


@pytest.mark.parametrize(("field", "value"), VALUES, ids=lambda value: str(value))
def test_every_framework_says_something_of_every_value_and_names_only_arguments_that_exist(field, value):
    lightning, accelerate, transformers = map(pytest.importorskip, ("lightning", "accelerate", "transformers"))
    from accelerate.utils import TorchDynamoPlugin

    known = {
        "DataLoader": DataLoader,
        "torch.optim.AdamW": torch.optim.AdamW,
        "L.Trainer": lightning.Trainer,
        "Accelerator": accelerate.Accelerator,
        "TorchDynamoPlugin": TorchDynamoPlugin,
        "DataLoaderConfiguration": accelerate.DataLoaderConfiguration,
        "torch.compile": torch.compile,
        "TrainingArguments": transformers.TrainingArguments,
    }
    base = Plan(**{key: other for key, other in BESIDE.items() if key != field})
    plan = dataclasses.replace(base, **{field: value})
    without, said = in_words(base, RECIPE), in_words(plan, RECIPE)
    assert set(said) == set(FRAMEWORKS)
    for name, text in said.items():
        assert text != without[name], f"{name} has neither a word nor a comment for it"
        if name == "NeMo":
            tree = yaml.safe_load(text)
            assert set(tree["trainer"]) <= set(inspect.signature(lightning.Trainer).parameters)
            assert set(tree["model"]["train_ds"]) <= TRAIN_DS
            continue
        for called, keywords in calls(text):
            if called in known:
                assert keywords <= set(inspect.signature(known[called]).parameters), called


def test_what_means_nothing_beside_the_rest_is_left_out():
    plan = Plan(persistent_workers=True, prefetch_factor=4, cache_dtype="float16", compile_scope="step")
    assert in_words(plan, RECIPE) == in_words(Plan(), RECIPE), "without workers, a cache, or compiling"


def test_the_recipe_is_said_in_full():
    said = in_words(Plan(), Recipe(batch_size=4, optimizer="sgd", epochs=None, steps=7, schedule="cosine"))
    assert dict(calls(said["PyTorch"]))["torch.optim.SGD"] == {"lr", "weight_decay", "momentum"}
    assert "max_steps=7" in said["Lightning"] and "clip" not in said["PyTorch"] + said["Lightning"]
    assert 'lr_scheduler_type="cosine"' in said["Hugging Face"] and "max_grad_norm=0" in said["Hugging Face"]
    assert yaml.safe_load(said["NeMo"])["model"]["optim"]["momentum"] == 0.9
    assert "onecycle" in in_words(Plan(), Recipe())["Hugging Face"]


def test_the_three_lines_of_the_report_put_the_plan_to_work(tmp_path):
    notebook = (Path(__file__).parent.parent / "notebooks" / "90_climb.ipynb").read_text()
    cells = ["".join(cell["source"]) for cell in json.loads(notebook)["cells"]]
    [lines] = re.findall(r"```python\n((?:.*\n){3})```", next(cell for cell in cells if "Three lines" in cell))
    (tmp_path / "plan.yaml").write_text(to_yaml(Plan(fused_optimizer=True, workers=1)))
    model, dataset = Net(), Images()
    found = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loader": DataLoader(dataset, 8)}
    exec(lines, found)
    images, labels = next(iter(found["loader"]))
    nn.functional.cross_entropy(found["model"](images), labels).backward()
    found["optimizer"].step()
    assert found["optimizer"].param_groups[0]["fused"] and found["model"] is model


def test_a_batch_size_that_is_still_to_be_found_is_refused():
    with pytest.raises(PlanError, match="batch_size=auto"):
        in_words(Plan(), Recipe(batch_size="auto"))


@pytest.mark.slow
def test_what_is_compiled_runs():
    torch.manual_seed(0)
    found = {
        "model": Net(),
        "dataset": Images(),
        "loss_function": nn.functional.cross_entropy,
        "device": torch.device("cpu"),
    }
    if HERE.why_not("compile"):
        pytest.skip(HERE.why_not("compile"))
    exec(in_words(Plan(compile="default"), RECIPE)["PyTorch"], found)
    assert isinstance(found["model"], torch._dynamo.eval_frame.OptimizedModule)
