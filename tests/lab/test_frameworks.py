"""A plan in the words of other frameworks: every line is executed, with the libraries, and the table is complete."""

import dataclasses
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from tiny import H100
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from speedkit.fallbacks import resolve
from speedkit.lab.frameworks import FRAMEWORKS, KEPT, change_in_words, in_words, read_table
from speedkit.machine import this_machine
from speedkit.measure.optimizations import OPTIMIZATIONS
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.process_state import process_state_kept

RECIPE = Recipe(batch_size=8)
HERE = this_machine("cpu")
PLANS = [
    Plan(),
    resolve(Plan.fast(HERE), HERE).plan,
    Plan(micro_batch=2, precision="bf16", workers=1, persistent_workers=True, log_every=3),
    Plan(validate_every=0.25),
    Plan(precision="fp16", fused_optimizer=True, cache="ram", validate_every=2, bucket=True, prefetch=True),
]
# Keys of `train_ds`, from NeMo's own configuration files and documentation:
# https://github.com/NVIDIA/NeMo/blob/main/examples/asr/conf/ssl/nest/nest_fast-conformer.yaml
# https://docs.nvidia.com/nemo/speech/nightly/dataloaders.html
TRAIN_DS = {"batch_size", "num_workers", "pin_memory", "use_lhotse", "use_bucketing"}


@pytest.fixture(autouse=True)
def nothing_left_switched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(os.environ)
    threads = torch.get_num_threads()
    with process_state_kept(HERE.device):
        yield
    torch.set_num_threads(threads)
    for name in set(os.environ) - before:  # Accelerate's and Lightning's
        del os.environ[name]
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


def execute(framework, lines):
    """Execute lines for a small net, code to be compiled in eager mode; return what they leave behind."""
    lightning, accelerate, transformers = map(pytest.importorskip, ("lightning", "accelerate", "transformers"))
    if framework == "NeMo":
        return follow_overrides(lightning, lines)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    inputs, targets = torch.randn(20, 3, 8, 8), torch.arange(20) % 2
    on_cpu = {"use_cpu": True, "output_dir": "out"}
    names = {"torch": torch, "lightning": lightning, "accelerate": accelerate, "device": torch.device("cpu")}
    names |= {"model": model, "blocks": [model[0]], "dataset": TensorDataset(inputs, targets)}
    names |= {"inputs": inputs[:8], "targets": targets[:8], "loss_function": nn.functional.cross_entropy}
    names["transformers"] = SimpleNamespace(
        TrainingArguments=lambda **given: transformers.TrainingArguments(**on_cpu, **given)
    )
    with torch.compiler.set_stance("force_eager"):
        exec(lines, names)
    return names


def follow_overrides(lightning, lines):
    overrides = [word[2:].split("=", 1) for word in re.sub("#.*", "", lines).split()]
    sections = {"trainer": {}, "model.train_ds": {}, "model.optim": {}}
    for path, value in overrides:
        section, _, key = path.rpartition(".")
        sections[section][key] = yaml.safe_load(value)
    assert set(sections["model.train_ds"]) <= TRAIN_DS
    torch.optim.AdamW([torch.zeros(1)], **sections["model.optim"])
    return {"trainer": lightning.Trainer(**sections["trainer"], logger=False, enable_checkpointing=False)}


@pytest.mark.slow  # the frameworks come by make setup-all
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_each_framework_takes_the_lines_of_a_plan(plan):
    words = in_words(plan, RECIPE)
    parts, half = 8 // (plan.micro_batch or 8), plan.precision in ("bf16", "fp16")
    assert execute("PyTorch", words["PyTorch"]).get("loader", DataLoader([0])).num_workers == plan.workers
    for framework in ("Lightning", "NeMo"):
        trainer = execute(framework, words[framework])["trainer"]
        assert (trainer.accumulate_grad_batches, trainer.precision != "32-true") == (parts, half)
    execute("Accelerate", words["Accelerate"])
    arguments = execute("Hugging Face", words["Hugging Face"])["arguments"]
    assert (arguments.gradient_accumulation_steps, arguments.bf16 or arguments.fp16) == (parts, half)
    assert arguments.optim == ("adamw_torch_fused" if plan.fused_optimizer else "adamw_torch")


NOT_ALONE = {"persistent_workers", "prefetch_factor", "strategy"}  # they take workers; and a GPU


@pytest.mark.parametrize("row", read_table(), ids=lambda row: f"{row['field']}={row['value']}")
def test_each_line_of_the_table_runs_alone(row):
    value = "fsdp" if row["field"] == "strategy" else 2
    if row["value"] not in ("", "*"):
        # A share, of an epoch; any cache.
        value = yaml.safe_load(row["value"].replace("[01].*", "0.5").replace("[!o]*", "ram"))
        Plan(**{row["field"]: value})  # which refuses what is no value of the field
    sizes = {"batch_size": 8, "micro_batch": 2, "parts": 4, "value": value, "kept": KEPT}
    for framework in FRAMEWORKS:
        if row["field"] not in NOT_ALONE:
            execute(framework, row[framework].format(**vars(Plan(compile="default")) | sizes))


@pytest.mark.parametrize("cache", ["disk", "ram", "device"])
def test_a_cache_is_a_data_set_in_plain_pytorch_that_makes_each_sample_once(cache):
    made = []

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            made.append(index)
            return torch.tensor(float(index**2)), index

    lines = in_words(Plan(cache=cache), RECIPE)["PyTorch"]
    names = {"torch": torch, "dataset": Squares()}
    exec(lines, names)
    epochs = [list(DataLoader(names["dataset"], 3)) for _ in range(2)]
    assert sorted(made) == [*range(6)] and epochs[1][1][0].tolist() == [9.0, 16.0, 25.0]
    assert len(KEPT.splitlines()) <= 12 and lines.startswith(KEPT)
    assert "\n" not in change_in_words(f"cache={cache}", "PyTorch")


def test_the_table_has_words_or_advice_for_every_field():
    fields = {row["field"] for row in read_table() if row["otherwise"] or any(row[name] for name in FRAMEWORKS)}
    assert fields | {row["needs"] for row in read_table()} - {""} == set(vars(Plan()))
    idle = Plan(persistent_workers=True, prefetch_factor=4, cache_dtype="float16", compile_scope="blocks")
    assert in_words(idle, RECIPE) == in_words(Plan(), RECIPE), "without workers, a cache, or compiling"


@pytest.mark.parametrize("optimization", OPTIMIZATIONS, ids=lambda optimization: optimization.name)
def test_each_framework_is_told_of_what_the_optimizations_switches_on(optimization):
    for before in (Plan(), Plan(precision="bf16", compile="default")):
        plain = in_words(before, RECIPE)
        for change in optimization.changes(before, HERE) + optimization.changes(before, H100):
            if (plan := dataclasses.replace(before, **change)) != before:
                words = in_words(plan, RECIPE)
                assert [name for name in FRAMEWORKS if words[name] == plain[name]] == [], change
