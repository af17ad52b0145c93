"""A plan in the words of other frameworks: what to write there, where training is not left to speedkit.

`WORDS` is all there is to it. Left out is what stands at its default, and the schedule of the learning rate, which is
no business of a plan. The words are those of torch 2.11, lightning 2.6, accelerate 1.15 and transformers 5.23; NeMo's
are of the configuration files under https://github.com/NVIDIA/NeMo/tree/main/examples/asr/conf, whose section
`trainer` takes any argument of Lightning's Trainer, and `optim` any of the optimizer's.
"""

import dataclasses
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from speedkit.errors import PlanError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.prepare import IN_THE_LOOP

OWN = ("setup", "data", "loader", "model", "compile", "optimizer")  # what PyTorch itself says, in a script of your own
LOADER = "give your DataLoader {field}={value}"


def _half(dtype: str, short: str, lightning: str) -> dict[str, str]:
    return {
        "pytorch": f"torch.autocast(device.type, torch.{dtype})",
        "lightning": f'precision="{lightning}"',
        "accelerate": f'mixed_precision="{short}"',
        "transformers": f"{short}=True",
        "nemo": f"trainer.precision: {lightning}",
    }


BF16 = _half("bfloat16", "bf16", "bf16-mixed")
FP8 = BF16 | {"note": "8-bit products are torchao's: convert_to_float8_training(model), before it is compiled"}
COMPILE = {
    "compile": 'model = torch.compile(model, mode="{value}")',
    "accelerate": 'dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="{value}")',
    "transformers": 'torch_compile=True\ntorch_compile_mode="{value}"',
    "else": 'model = torch.compile(model, mode="{value}"), before the trainer gets it',
}
SDPA = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn"}  # attention kernels as torch switches them


def _only(kernel: str) -> dict[str, str]:
    calls = [f"torch.backends.cuda.enable_{name}_sdp(False)" for own, name in SDPA.items() if own != kernel]
    return {"setup": "\n".join(calls), "else": f"in your script: {'; '.join(calls)}"}


# By field, or by field and value: what is said, and where. "else" is what to do where a framework has no word for it,
# "note" what to do besides; with neither, it is what a loop of one's own has to do. NeMo's words are keys of its file.
WORDS: dict[Any, dict[str, str]] = {
    "micro_batch": {
        "pytorch": "",
        "lightning": "accumulate_grad_batches={parts}",
        "accelerate": "gradient_accumulation_steps={parts}",
        "transformers": "gradient_accumulation_steps={parts}",
        "nemo": "trainer.accumulate_grad_batches: {parts}",
    },
    ("micro_batch", "auto"): {},
    ("precision", "tf32"): {
        "setup": 'torch.set_float32_matmul_precision("high")',
        "transformers": "tf32=True",
        "else": 'torch.set_float32_matmul_precision("high") in your script',
    },
    ("precision", "bf16"): BF16,
    ("precision", "fp16"): _half("float16", "fp16", "16-mixed"),
    ("precision", "fp8"): FP8,
    ("precision", "fp8-emulated"): FP8,
    ("compile", "model"): COMPILE,
    ("compile", "step"): COMPILE | {"note": "to compile the loss with it, call both in one function, and compile that"},
    ("compile", "blocks"): {
        "else": 'compile the repeated blocks of your model, each with block.compile(mode="{value}")',
        "compile": 'for block in blocks:  # those of your model that repeat\n    block.compile(mode="{value}")',
        "accelerate": 'dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="{value}", '
        "use_regional_compilation=True)",
    },
    "channels_last": {
        "model": "model = model.to(memory_format=torch.channels_last)",
        "else": "model.to(memory_format=torch.channels_last), before the trainer gets it",
    },
    **{("attention", kernel): _only(kernel) for kernel in (*SDPA, "math")},
    ("checkpointing", "blocks"): {
        "transformers": "activation_checkpointing=True",
        "else": "call each block as torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    },
    ("checkpointing", "selective"): {
        "else": "call each block as torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=...), "
        "with create_selective_checkpoint_contexts of the products to keep"
    },
    "fused_optimizer": {"optimizer": "fused=True", "transformers": "", "nemo": "model.optim.fused: true"},
    ("cache", "ram"): {
        "data": "dataset = TensorDataset(*default_collate([dataset[i] for i in range(len(dataset))]))",
        "else": "make all samples once, before the first epoch, and train from memory",
    },
    ("cache", "device"): {"else": "make all samples once, move them to the GPU, and index them there"},
    ("cache", "disk"): {"else": "write all samples once, to a numpy.memmap, and read batches from that"},
    "cache_of": {"else": "keep waveforms, and compute features from them where the batch is"},
    "cache_dtype": {"else": "keep the inputs as .half(), and turn each batch back with .float()"},
    "shards": {"nemo": "model.train_ds.is_tarred: true\nmodel.train_ds.tarred_audio_filepaths: ???"},
    "workers": {
        "loader": "num_workers={value}",
        "transformers": "dataloader_num_workers={value}",
        "nemo": "model.train_ds.num_workers: {value}",
    },
    ("workers", "auto"): {"else": "try some numbers of loader processes; speedkit's effective plan names the best"},
    "worker_kind": {"else": "a DataLoader has processes only; it takes a loader of your own to have threads"},
    "persistent_workers": {
        "loader": "persistent_workers=True",
        "transformers": "dataloader_persistent_workers=True",
        "else": LOADER,
    },
    "prefetch_factor": {
        "loader": "prefetch_factor={value}",
        "transformers": "dataloader_prefetch_factor={value}",
        "else": LOADER,
    },
    "pin_memory": {"loader": "pin_memory=True", "transformers": "", "nemo": "model.train_ds.pin_memory: true"},
    "prefetch": {
        "accelerate": "dataloader_config=DataLoaderConfiguration(non_blocking=True)",
        "else": "copy the next batch on a torch.cuda.Stream of its own while this one computes",
    },
    "drop_last": {
        "loader": "drop_last=True",
        "transformers": "dataloader_drop_last=True",
        "nemo": "model.train_ds.drop_last: true",
    },
    "bucket": {
        "transformers": 'train_sampling_strategy="group_by_length"',
        "nemo": "model.train_ds.use_lhotse: true\nmodel.train_ds.use_bucketing: true",
    },
    "log_every": {
        "pytorch": "",
        "accelerate": "",
        "lightning": "log_every_n_steps={value}",
        "transformers": "logging_steps={value}",
        "nemo": "trainer.log_every_n_steps: {value}",
    },
    "validate_every": {
        "lightning": "val_check_interval={value}\ncheck_val_every_n_epoch=None",
        "transformers": 'eval_strategy="steps"\neval_steps={value}',
        "nemo": "trainer.val_check_interval: {value}\ntrainer.check_val_every_n_epoch: null",
    },
    ("validate_every", 0): {
        "lightning": "limit_val_batches=0",
        "nemo": "trainer.limit_val_batches: 0",
        "note": "evaluate when training has ended",
    },
    "allocator": {"else": "start with PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"},
    "ranks": {"lightning": "devices={value}", "nemo": "trainer.devices: {value}"},
    "strategy": {
        "lightning": 'strategy="{value}"',
        "nemo": "trainer.strategy: {value}",
        "else": "wrap the model in torch.distributed.fsdp.fully_shard",
    },
}


@dataclasses.dataclass
class Said:
    """What a framework has words for, by place, and what else there is to do; with the sizes behind it."""

    plan: Plan
    recipe: Recipe
    micro_batch: int
    parts: int  # forward passes in a step
    words: dict[str, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    comments: list[str] = dataclasses.field(default_factory=list)


def in_words(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return, by framework, a snippet that does there what `plan` does here: Python, and YAML for NeMo.

    It finds your `dataset`, `model`, `loss_function`, in PyTorch `device`, in Lightning `YourModule`. Give it an
    effective plan: nothing is resolved here. Raises PlanError for a batch size that is still to be found.
    """
    if not isinstance(recipe.batch_size, int):
        raise PlanError("batch_size=auto has no words elsewhere: give the number that training with auto has found")
    return {name: write(_said(plan, recipe, places)) for name, (places, write) in FRAMEWORKS.items()}


def _said(plan: Plan, recipe: Recipe, places: Iterable[str]) -> Said:
    batch_size = int(recipe.batch_size)
    micro_batch = min(plan.micro_batch if isinstance(plan.micro_batch, int) else batch_size, batch_size)
    said = Said(plan, recipe, micro_batch, math.ceil(batch_size / micro_batch))
    idle = {"compile_scope"}  # is part of what is said about compile; the others mean nothing beside these
    idle |= {"persistent_workers", "prefetch_factor", "worker_kind"} if plan.workers == 0 else set()
    idle |= {"cache_of", "cache_dtype"} if plan.cache == "off" else set()
    refused = (
        recipe.clip_norm and plan.precision not in ("default", "fp32", "tf32") and {"lightning", "nemo"} & set(places)
    )
    for field, value in vars(plan).items():
        # Elsewhere other defaults hold: how often to read the loss, and on how many GPUs to train, is always said.
        if field in idle or (value == getattr(Plan(), field) and field not in ("log_every", "ranks")):
            continue
        found = WORDS.get((field, plan.compile_scope if field == "compile" else value), WORDS.get(field, {}))
        if field == "fused_optimizer" and refused:
            found = {"else": "Lightning clips no gradients of a fused optimizer under mixed precision"}
        about = {"field": field, "value": value, "parts": said.parts}
        taken = [place for place in places if place in found]
        for place in taken:
            said.words[place] += found[place].format(**about).splitlines()
        advice = found.get("note", "" if taken else found.get("else") or IN_THE_LOOP[field])
        if advice and value != getattr(Plan(), field):
            said.comments.append(f"{field}={value}: {advice.format(**about)}")
    return said


def _text(said: Said, *lines: str) -> str:
    """Return a snippet: its lines, then what there is to do besides, as comments."""
    comments = [textwrap.fill(f"# {each}", 88, subsequent_indent="#   ") for each in said.comments]
    return "\n".join([*lines, *comments]) + "\n"


def _call(name: str, arguments: Iterable[str]) -> list[str]:
    """Return a call, with a line per argument where one line would be long."""
    line = f"{name}({', '.join(arguments)})"
    return [line] if len(line) < 80 else [f"{name}(", *_indented(*(f"{each}," for each in arguments)), ")"]


def _indented(*lines: str) -> list[str]:
    return [f"    {line}" for line in lines]


def _data(said: Said, batch_size: int, *imports: str) -> list[str]:
    """Return the first lines of a script that makes its own DataLoader."""
    more = ", TensorDataset, default_collate" * bool(said.words["data"])
    loader = ["dataset", f"batch_size={batch_size}", "shuffle=True", *said.words["loader"]]
    return [
        *imports,
        "import torch",
        f"from torch.utils.data import DataLoader{more}",
        "",
        *said.words["setup"],
        *said.words["data"],
        *_call("loader = DataLoader", loader),
    ]


def _optimizer(said: Said, made: str, parameters: str) -> list[str]:
    recipe, kind = said.recipe, {"adamw": "AdamW", "sgd": "SGD"}[said.recipe.optimizer]
    momentum = [f"momentum={recipe.momentum:g}"] if kind == "SGD" else []
    rates = [f"lr={recipe.learning_rate:g}", f"weight_decay={recipe.weight_decay:g}"]
    return _call(f"{made} torch.optim.{kind}", [parameters, *rates, *momentum, *said.words["optimizer"]])


def _loop(said: Said, *body: str) -> list[str]:
    log = [f"if step % {said.plan.log_every} == 0:", "    print(loss.item())"]
    return ["for step, (inputs, targets) in enumerate(loader, 1):  # one epoch", *_indented(*body, *log)]


def _pytorch(said: Said) -> str:
    plan, norm, scaled, split = said.plan, said.recipe.clip_norm, said.plan.precision == "fp16", said.parts > 1
    body = [f"loss = loss_function(model({'part), wanted' if split else 'inputs), targets'})"]
    body = [f"with {said.words['pytorch'][0]}:", *_indented(*body)] if said.words["pytorch"] else body
    # Each part's mean weighs as many samples as it has, so that their sum is the mean over the batch.
    loss = "(loss * len(part) / len(inputs))" if split else "loss"
    body += [f"scaler.scale({loss}).backward()" if scaled else f"{loss}.backward()"]
    if split:
        parts = f"zip(inputs.split({said.micro_batch}), targets.split({said.micro_batch}))"
        body = [f"for part, wanted in {parts}:", *_indented(*body)]
    body += ["scaler.unscale_(optimizer)"] if scaled and norm else []
    body += [f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm:g})"] if norm else []
    body += ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
    copy = ", non_blocking=True" if plan.pin_memory else ""
    move = f"inputs, targets = inputs.to(device{copy}), targets.to(device{copy})"
    return _text(
        said,
        *_data(said, int(said.recipe.batch_size)),
        *said.words["model"],
        *_optimizer(said, "optimizer =", "model.parameters()"),
        *said.words["compile"],
        *(["scaler = torch.amp.GradScaler(device.type)"] if scaled else []),
        *_loop(said, move, *body, "optimizer.zero_grad()"),
    )


def _accelerate(said: Said) -> str:
    imports = ["from accelerate import Accelerator" + ", DataLoaderConfiguration" * said.plan.prefetch]
    imports += ["from accelerate.utils import TorchDynamoPlugin"] * (said.plan.compile != "off")
    norm = said.recipe.clip_norm
    body = [
        "loss = loss_function(model(inputs), targets)",
        "accelerator.backward(loss)",
        *([f"accelerator.clip_grad_norm_(model.parameters(), {norm:g})"] if norm else []),
        "optimizer.step()",
        "optimizer.zero_grad()",
    ]
    body = ["with accelerator.accumulate(model):", *_indented(*body)] if said.parts > 1 else body
    return _text(
        said,
        *_data(said, said.micro_batch, *imports),
        *said.words["model"],
        *_optimizer(said, "optimizer =", "model.parameters()"),
        *_call("accelerator = Accelerator", said.words["accelerate"]),
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        *_loop(said, *body),
    )


def _length(recipe: Recipe, epochs: str = "max_epochs") -> tuple[str, int | None]:
    return (epochs, recipe.epochs) if recipe.steps is None else ("max_steps", recipe.steps)


def _lightning(said: Said) -> str:
    trainer = ["{}={}".format(*_length(said.recipe)), *said.words["lightning"]]
    trainer += [f"gradient_clip_val={said.recipe.clip_norm:g}"] if said.recipe.clip_norm else []
    return _text(
        said,
        *_data(said, said.micro_batch, "import lightning as L"),
        "",
        "class Planned(YourModule):  # YourModule is your LightningModule",
        "    def configure_optimizers(self):",
        *_indented(*_indented(*_optimizer(said, "return", "self.parameters()"))),
        "",
        "model = Planned()",
        *said.words["model"],
        *said.words["compile"],
        *_call("trainer = L.Trainer", trainer),
        "trainer.fit(model, loader)",
    )


def _transformers(said: Said) -> str:
    plan, recipe = said.plan, said.recipe
    if recipe.schedule == "onecycle":
        said.comments.append("the schedule is onecycle: give the Trainer optimizers=(optimizer, scheduler) of your own")
    tested = ", eval_dataset=test_dataset" * bool(plan.validate_every)
    kind = "sgd" if recipe.optimizer == "sgd" else "adamw_torch_fused" if plan.fused_optimizer else "adamw_torch"
    # Said whatever the plan: where it is silent, this framework does something else than PyTorch.
    given = [
        'output_dir="out"',
        f"per_device_train_batch_size={said.micro_batch}",
        "{}={}".format(*_length(recipe, "num_train_epochs")),
        f"learning_rate={recipe.learning_rate:g}",
        f'lr_scheduler_type="{"cosine" if recipe.schedule == "cosine" else "constant"}"',
        f'optim="{kind}"',
        f"weight_decay={recipe.weight_decay:g}",
        f"max_grad_norm={recipe.clip_norm or 0:g}",
        f"dataloader_pin_memory={plan.pin_memory}",
        "use_cpu=not torch.accelerator.is_available()",
        *said.words["transformers"],
    ]
    return _text(
        said,
        "import torch",
        "from transformers import Trainer, TrainingArguments",
        "",
        *_call("arguments = TrainingArguments", given),
        f"trainer = Trainer(model=model, args=arguments, train_dataset=dataset{tested})",
    )


def _nemo(said: Said) -> str:
    recipe, (length, count) = said.recipe, _length(said.recipe)
    sections: dict[str, Any] = {
        "trainer": {length: count},
        "train_ds": {"batch_size": said.micro_batch},
        "optim": {"name": recipe.optimizer, "lr": recipe.learning_rate, "weight_decay": recipe.weight_decay},
    }
    sections["trainer"] |= {"gradient_clip_val": recipe.clip_norm} if recipe.clip_norm else {}
    sections["optim"] |= {"momentum": recipe.momentum} if recipe.optimizer == "sgd" else {}
    for word in said.words["nemo"]:
        path, _, value = word.partition(": ")
        *_, section, key = path.split(".")
        sections[section][key] = yaml.safe_load(value)
    tree = {"trainer": sections.pop("trainer"), "model": sections}
    return _text(said, *yaml.safe_dump(tree, sort_keys=False).splitlines())


FRAMEWORKS: dict[str, tuple[tuple[str, ...], Callable[[Said], str]]] = {
    "PyTorch": ((*OWN, "pytorch"), _pytorch),
    "Lightning": ((*OWN, "lightning"), _lightning),
    "Accelerate": ((*(place for place in OWN if place != "compile"), "accelerate"), _accelerate),
    "Hugging Face": (("transformers",), _transformers),
    "NeMo": (("nemo",), _nemo),
}
