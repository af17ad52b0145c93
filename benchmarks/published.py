"""How near predictions come to what others have published: published.csv has the cases, published.json their counts.

`python benchmarks/published.py` prints the table of errors from the counts; with names of cases behind it, or `all`, it
counts those anew, each in a process that has the GPU which is not there. No case marked `new` has chosen a constant.
"""

import csv
import gc
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import common
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from speedkit import Plan, Recipe, from_loader
from speedkit.dry.gpus import GPUS
from speedkit.dry.predict import seconds_by_kind
from speedkit.dry.process import run
from speedkit.files import read_json, write_json
from speedkit.workload import Workload

CASES = Path(__file__).with_suffix(".csv")
COUNTS = Path(__file__).with_suffix(".json")
# What a plan sets; other formats are of the weights.
PRECISIONS: dict[str, Any] = {"tf32": "tf32", "amp-bf16": "bf16", "amp-fp16": "fp16"}
WEIGHTS = {"bf16": torch.bfloat16, "fp16-master": torch.float16}
BERT = {"bert-base": (768, 12), "bert-large": (1024, 24)}  # hidden units, layers
WORDS, CLASSES = 50257, 1000
# Mean factors from what was published that new cases should not exceed.
AIMS = {"step, eager": 1.15, "step, compiled": 1.2, "memory": 1.02, "one optimization": 1.06}


# ---- the models ----


class OwnNorm(nn.Module):
    """Layer normalization, spelled out."""

    def __init__(self, units: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(units))
        self.shift = nn.Parameter(torch.zeros(units))

    def forward(self, inputs: Tensor) -> Tensor:
        mean = inputs.mean(-1, keepdim=True)
        variance = inputs.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((inputs - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class OwnGelu(nn.Module):
    """GELU by its tanh, spelled out."""

    def forward(self, inputs: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / math.pi, device=inputs.device))
        return 0.5 * inputs * (1 + torch.tanh(root * (inputs + 0.044715 * torch.pow(inputs, 3))))


class Attention(nn.Module):
    """Causal attention: by PyTorch's function (flash), in products, or with three projections too (own)."""

    mask: Tensor

    def __init__(self, units: int, heads: int, *, length: int, dropout: float, kind: str):
        super().__init__()
        self.heads, self.dropout, self.kind = heads, dropout, kind
        if kind == "own":
            self.projections = nn.ModuleList(nn.Linear(units, units, bias=False) for _ in range(3))
        else:
            self.projection = nn.Linear(units, 3 * units)
        self.out = nn.Linear(units, units)
        self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, units = inputs.shape
        if self.kind == "own":
            parts = [projection(inputs) for projection in self.projections]
        else:
            parts = list(self.projection(inputs).split(units, dim=2))
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        if self.kind == "flash":
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        else:
            scores = query @ key.transpose(2, 3)
            scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
            weights = torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1)
            mixed = F.dropout(weights, self.dropout, self.training) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, units))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, units: int, heads: int, *, dropout: float, own: bool, **attention: Any):
        super().__init__()
        norm = OwnNorm if own else nn.LayerNorm
        self.norms = nn.ModuleList(norm(units) for _ in range(2))
        self.attention = Attention(units, heads, dropout=dropout, **attention)
        gelu = OwnGelu() if own else nn.GELU(approximate="tanh")
        self.feed_forward = nn.Sequential(nn.Linear(units, 4 * units), gelu, nn.Linear(4 * units, units))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed = inputs + self.dropout(self.attention(self.norms[0](inputs)))
        return mixed + self.dropout(self.feed_forward(self.norms[1](mixed)))


class Gpt(nn.Module):
    """GPT-2 with 124 million weights, as its reproductions write it."""

    def __init__(self, options: dict[str, str], units: int = 768):
        super().__init__()
        length, words = 1024, int(options.get("vocabulary", WORDS))
        dropout, own = float(options.get("dropout", 0)), options.get("norms") == "own"
        self.words = nn.Embedding(words, units)
        self.places = nn.Embedding(length, units)
        self.dropout = nn.Dropout(dropout)
        kind = options["attention"]
        self.blocks = nn.Sequential(
            *(Block(units, 12, dropout=dropout, own=own, length=length, kind=kind) for _ in range(12))
        )
        self.norm = (OwnNorm if own else nn.LayerNorm)(units)
        self.head = nn.Linear(units, words, bias=False)
        if "tied" in options:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        places = self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.norm(self.blocks(self.dropout(self.words(words) + places)))).flatten(0, 1)


class WideBlock(nn.Module):
    """A block of a wide residual network, its activations first."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels_in), nn.BatchNorm2d(channels)])
        self.first = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, stride=stride, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        inner = F.dropout(self.first(F.relu(self.norms[0](inputs))), 0.3, self.training)
        return self.second(F.relu(self.norms[1](inner))) + self.shortcut(inputs)


def wide_resnet() -> nn.Module:
    """Return WRN-28-10 for images of 32 x 32 (Zagoruyko and Komodakis 2016)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    channels_in = 16
    for stage, channels in enumerate((160, 320, 640)):
        for number in range(4):
            layers.append(WideBlock(channels_in, channels, 2 if stage and not number else 1))
            channels_in = channels
    ends = [nn.BatchNorm2d(640), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, 10)]
    return nn.Sequential(*layers, *ends)


class Bert(nn.Module):
    """Hugging Face's BERT that answers questions, from its configuration."""

    def __init__(self, units: int, layers: int):
        super().__init__()
        from transformers import BertConfig, BertForQuestionAnswering

        config = BertConfig(
            hidden_size=units, num_hidden_layers=layers, num_attention_heads=units // 64, intermediate_size=4 * units
        )
        config._attn_implementation = "eager"
        self.net = BertForQuestionAnswering(config)

    def forward(self, words: Tensor) -> Tensor:
        outputs = self.net(words, attention_mask=torch.ones_like(words))
        return torch.cat([outputs.start_logits, outputs.end_logits])


def model_of(name: str, options: dict[str, str]) -> nn.Module:
    """Return the model of a case."""
    if name == "gpt":
        return Gpt(options)
    if name in BERT:
        return Bert(*BERT[name])
    if name == "wide_resnet":
        return wide_resnet()
    if name == "vit_small_patch16":
        return torchvision.models.VisionTransformer(224, 16, 12, num_heads=6, hidden_dim=384, mlp_dim=1536)
    return getattr(torchvision.models, name)()


# ---- a case as a workload and a plan ----


def cases() -> list[dict[str, str]]:
    """Return the rows of published.csv."""
    with CASES.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def options_of(case: dict[str, str]) -> dict[str, str]:
    """Return what a case's column `options` says."""
    return dict(word.split("=") for word in case["options"].split())


def batch_of(case: dict[str, str], options: dict[str, str]) -> tuple[Tensor, Tensor]:
    """Return a batch on the GPU."""
    size = int(case["batch"])
    if case["model"] == "gpt" or case["model"] in BERT:
        words = torch.zeros(size, int(options.get("length", 1024)), dtype=torch.long, device="cuda")
        return words, words if case["model"] == "gpt" else torch.zeros(size, 2, dtype=torch.long, device="cuda")
    side = 32 if case["model"] == "wide_resnet" else 224
    layout = torch.channels_last if "channels_last" in options else torch.contiguous_format
    images = torch.zeros(size, 3, side, side, device="cuda").contiguous(memory_format=layout)
    return images, torch.zeros(size, dtype=torch.long, device="cuda")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1].flatten())


def workload_of(case: dict[str, str]) -> tuple[Workload, Plan]:
    """Return a case as a workload and a plan."""
    options = options_of(case)

    def make() -> nn.Module:
        with torch.device("cuda"):  # nothing is computed there, the first weights neither
            return model_of(case["model"], options).to(WEIGHTS.get(case["precision"], torch.float32))

    size = int(case["batch"])
    language = case["model"] == "gpt" or case["model"] in BERT
    recipe = Recipe(batch_size=size, epochs=None, steps=100, optimizer="adamw" if language else "sgd")
    loader = [batch_of(case, options)] * 100
    workload = from_loader(make, loader, loss_of, recipe=recipe, name=case["case"])
    plan = Plan(
        precision=PRECISIONS.get(case["precision"], "default"),
        compile="default" if "compile" in options else "off",
        channels_last="channels_last" in options,
        attention="math" if case["model"].startswith("vit") else "auto",
        checkpointing="blocks" if "checkpointing" in options else "off",
        fused_optimizer="fused" in options,
        micro_batch=size // int(options["accumulate"]) if "accumulate" in options else None,
    )
    return workload, plan


def count(names: list[str], path: Path = COUNTS) -> None:
    """Write into the file at `path` what a step of each case asks of the GPU; called in a process that has it."""
    from speedkit.dry.step import counted_step

    for case in cases():
        if name_of(case) in names:
            gc.collect()
            torch._dynamo.reset()
            torch._C._cuda_clearCublasWorkspaces()  # what earlier cases have left in memory
            workload, plan = workload_of(case)
            counted = counted_step(workload, workload.recipe, plan, search=False)
            if counted is not None:
                del counted["kernels"], counted["fallbacks"]
            write_json(path, (read_json(path) if path.exists() else {}) | {name_of(case): counted})


def name_of(case: dict[str, str]) -> str:
    """Return what a case is called in published.json."""
    return f"{case['case']} on {case['gpu']}"


def count_anew(words: list[str]) -> None:
    """Count the cases whose names hold one of `words`, or of `all`: those of a GPU in one process."""
    for gpu in GPUS:
        names = [name_of(case) for case in cases() if case["gpu"] == gpu]
        names = [name for name in names if "all" in words or any(word in name for word in words)]
        if names:
            run("published:count", GPUS[gpu], timeout_s=3600, names=names)


# ---- the errors ----


def ratios(chosen: str) -> dict[str, dict[str, float]]:
    """Return predicted by published of the cases of a set, old or new, by what is predicted and by case."""
    counted = read_json(COUNTS)
    found: dict[str, dict[str, float]] = {"step, eager": {}, "step, compiled": {}, "memory": {}, "one optimization": {}}
    known = [case for case in cases() if case["set"] == chosen and counted.get(name_of(case))]
    seconds = {}
    for case in known:
        name = name_of(case)
        facts = counted[name]
        seconds[name] = sum(seconds_by_kind(facts, GPUS[case["gpu"]]).values())
        kind = "step, compiled" if "fused_bytes" in facts else "step, eager"
        found[kind][name] = 1e3 * seconds[name] / float(case["step_ms"])
        if case["reserved_gib"]:
            found["memory"][name] = facts["memory"]["reserved"] / 2**30 / float(case["reserved_gib"])
    for before, after in itertools.combinations(known, 2):
        if differ_in_one(before, after):
            names = name_of(before), name_of(after)
            published = float(before["step_ms"]) / float(after["step_ms"])
            found["one optimization"][" to ".join(names)] = seconds[names[0]] / seconds[names[1]] / published
    return found


def differ_in_one(before: dict[str, str], after: dict[str, str]) -> bool:
    """Return whether two cases of one source are the same but for one optimization."""
    if any(before[column] != after[column] for column in ("source", "gpu", "model", "batch")):
        return False
    changes = dict(options_of(before).items() ^ options_of(after).items())
    return len(changes) + (before["precision"] != after["precision"]) == 1


def mean_factor(values: Iterable[float]) -> float:
    """Return the geometric mean of how far ratios are from 1, either way."""
    return math.exp(statistics.mean(abs(math.log(value)) for value in values))


def table() -> str:
    """Return the errors of all predictions as a table in Markdown, the new cases apart."""
    lines = [
        "| what is predicted | cases | mean factor | worst | new cases | mean factor | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    new = ratios("new")
    for what, old in ratios("old").items():
        cells = [what]
        for side in (old, new[what]):
            worst = max((max(value, 1 / value) for value in side.values()), default=math.nan)
            cells += [
                str(len(side)),
                f"{mean_factor(side.values()):.2f}" if side else "",
                f"{worst:.2f}" if side else "",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def each_case() -> str:
    """Return predicted by published of each case, as the rows of a table in Markdown."""
    lines = []
    for chosen in ("old", "new"):
        for what, rows in ratios(chosen).items():
            lines += [f"| {name} | {chosen} | {what} | {ratio:.2f} |" for name, ratio in rows.items()]
    return "\n".join(lines)


def measure(quick: bool) -> Iterator[common.Result]:
    """How far predictions lie from what was published, of the cases that chose nothing."""
    print(each_case(), table(), sep="\n\n")
    for what, found in ratios("new").items():
        factors = [max(ratio, 1 / ratio) for ratio in found.values()]
        mean = mean_factor(factors)
        yield common.Result(f"{what}, mean factor", mean, min(factors), max(factors), AIMS[what])


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--quick"]):
        count_anew(sys.argv[1:])
        del sys.argv[1:]
    common.main(measure)
