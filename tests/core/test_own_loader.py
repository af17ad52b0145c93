"""Any model, loader and step as a workload: batches of any form, the same for every plan; reasons and sentences."""

import collections
import contextlib
import dataclasses
import functools
import itertools

import pytest
import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from speedkit import compare, fit, from_loader, load_workload, profile, tune
from speedkit.errors import PlanError, UsageError
from speedkit.lab.records import validate_record
from speedkit.lab.report import in_short
from speedkit.measure.quality import curve, quality_of
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

# What nanoGPT's model.py and its script have: a loss in the forward pass, and get_batch.
NANO = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(7, 16), nn.Sequential(Block(), Block()), nn.Linear(16, 7)
        print("number of parameters: 2k")

    def forward(self, idx, targets=None):
        logits = self.head(self.blocks(self.embed(idx)))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten()) if targets is not None else None

data = {split: torch.arange(4000) % 7 for split in ("train", "val")}

def get_batch(split):
    ix = torch.randint(len(data[split]) - 9, (8,))
    x, y = (torch.stack([data[split][i + shift : i + shift + 8] for i in ix]) for shift in (0, 1))
    return x, y
"""
# And what its user writes.
MINE = """
from nano import GPT, get_batch
from speedkit import Recipe, from_loader

def batches(split):
    while True:
        yield get_batch(split)

def work():
    return from_loader(
        GPT,
        lambda seed: batches("train"),
        lambda model, batch: model(*batch)[1],
        test=lambda seed: batches("val"),
        recipe=Recipe(steps=40, epochs=None, learning_rate=1e-2),
    )
"""
HUGGING_FACE = """
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel
from speedkit import Recipe, from_loader

rows = [torch.arange(start, start + 8) % 7 for start in range(160)]
config = GPT2Config(vocab_size=7, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)

def collate(rows):
    return BatchEncoding({"input_ids": torch.stack(rows), "labels": torch.stack(rows)})

def work():
    return from_loader(
        lambda: GPT2LMHeadModel(config),
        lambda seed: DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate),
        lambda model, batch: model(**batch).loss,
        recipe=Recipe(epochs=2, learning_rate=1e-2),
    )
"""


NEEDS_ALL = pytest.param(HUGGING_FACE, marks=pytest.mark.slow)  # transformers comes by make setup-all


@pytest.fixture(params=[MINE, NEEDS_ALL], ids=["nanoGPT", "Hugging Face"])
def work(request, tmp_path, monkeypatch):
    assert len(request.param.strip().splitlines()) <= 24  # and tune(work())
    name = f"mine_{len(request.param)}"
    (tmp_path / "nano.py").write_text(NANO)
    (tmp_path / f"{name}.py").write_text(request.param)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return load_workload(f"{name}:work")


def test_models_of_others_are_trained_as_they_are(work):
    history = fit(work, device="cpu", progress=False)
    assert history.loss[-1] < history.loss[0] / 2 and history.evaluation["value"] < history.loss[0] / 2
    assert history.evaluation["metric"] in ("test loss", "training loss") and history.evaluation["n"] == 160


@pytest.mark.slow
def test_models_of_others_are_tuned_on(work, tmp_path, capsys):
    optimizations = ["workers", "cache", "bucket", "precision"]
    capsys.readouterr()  # what was printed when the loader was looked at
    record = tune(
        work, device="cpu", out=tmp_path / "tune", budget_s=60, pairs=10, seeds=2, optimizations=optimizations
    )
    validate_record(record)
    why = {row["optimization"]: row["why"] for row in record["optimizations"]}
    assert {row["promises"] for row in record["optimizations"] if row["optimization"] == "workers"} == {"order-equal"}
    assert "no items" in why["cache"] and "no items" in why["bucket"] and in_short(record)
    assert "number of parameters" not in capsys.readouterr().out


# ---- batches ----

Pair = collections.namedtuple("Pair", ["inputs", "targets"])


FORMS = {  # how a batch is made of inputs and targets, and taken apart
    "named": (Pair, lambda batch: (batch.inputs, batch.targets)),
    "nested": (lambda x, y: {"a": [x], "b": (y, 3, None)}, lambda batch: (batch["a"][0], batch["b"][0])),
    "mapping": (lambda x, y: collections.UserDict(x=x, y=y), lambda batch: (batch.data["x"], batch.data["y"])),
    "unsplittable": (lambda x, y: (x, y, ["a name"] * len(y)), lambda batch: batch[:2]),
}
INPUTS = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
POINTS = list(zip(INPUTS, (INPUTS[:, 0] > 0).long(), strict=True))


def loader(form="named", **options):
    def collate(rows):
        return FORMS[form][0](*map(torch.stack, zip(*rows, strict=True)))

    return DataLoader(POINTS, **{"batch_size": 10, "shuffle": True, "collate_fn": collate} | options)


def step(model, batch, form="named"):
    inputs, targets = FORMS[form][1](batch)
    return nn.functional.cross_entropy(model(inputs), targets)


def mine(make=lambda seed: loader(), step=step, **options):
    model = functools.partial(tiny.make_model, 8, 16, 2, dropout=0.1)
    return from_loader(model, make, step, **{"recipe": Recipe(epochs=3, learning_rate=1e-2)} | options)


def course(work, recipe=None, *, plan=None, **options):
    plan = Plan(**{"log_every": 1, "validate_every": 3} | (plan or {}))
    return fit(work, recipe, plan, device="cpu", progress=False, **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_any_form_is_learned_from_whole_and_in_parts(form):
    work = mine(lambda seed: loader(form), lambda model, batch: step(model, batch, form))
    work = dataclasses.replace(work, model=functools.partial(tiny.make_model, 8, 16, 2))
    whole, parts = course(work), course(work, plan={"micro_batch": 4})
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5) and len(whole.loss) == 12
    reasons = ["it stays whole" in fallback.why for fallback in parts.effective.fallbacks]
    assert reasons == ([True] if form == "unsplittable" else [])
    assert course(work, plan={"micro_batch": "auto"}).loss == pytest.approx(whole.loss, rel=1e-5)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(POINTS)


def test_every_plan_learns_from_the_same_batches_and_a_resumed_run_goes_on_with_them(tmp_path):
    losses = course(mine()).loss
    for plan in ({"workers": 2}, {"workers": 2, "persistent_workers": True}, {"log_every": 1, "validate_every": 0}):
        assert course(mine(), plan=plan).loss == losses
    assert course(mine(loader())).loss == losses  # one that is there
    drawn = [course(mine(loader(generator=torch.Generator())), plan={"workers": workers}).loss for workers in (0, 2)]
    assert drawn[0] == drawn[1] != losses
    assert course(mine(), dataclasses.replace(mine().recipe, seed=1)).loss != losses

    plan = Plan(log_every=1, validate_every=3)
    with contextlib.closing(setup_run(mine(), plan=plan, device="cpu", out=tmp_path, progress=False)) as stopped:
        assert [*itertools.islice(steps(stopped), 6)][-1] == 6  # in the middle of the second epoch
    resumed = course(mine(), out=tmp_path, resume=True)
    assert resumed.resumed_from == 6 and resumed.loss == losses


def test_what_a_loader_cannot_do_falls_back_with_its_reason_and_its_own_settings_stay():
    own = course(mine(loader(num_workers=1, drop_last=True, batch_size=12)))
    assert (own.effective.plan.workers, own.effective.fallbacks) == (1, ())
    assert own.recipe.batch_size == 12 and own.steps == 9
    recipe = Recipe(epochs=None, steps=6)
    asked = {"workers": 2, "cache": "ram"}
    for make, why in (
        (DataLoader(Stream(), 10), "give your loader a number"),
        ([*loader()], "a list makes its batches"),
    ):
        history = course(mine(make, recipe=recipe, step=functools.partial(step, form="unsplittable")), plan=asked)
        reasons = {fallback.field: fallback.why for fallback in history.effective.fallbacks}
        assert reasons.keys() == asked.keys() and why in reasons["workers"] and "no items" in reasons["cache"]
    with pytest.raises(PlanError, match="the loader of yours makes batches of 10: set it there"):
        course(mine(), Recipe(batch_size=5))
    with pytest.raises(PlanError, match="drop_last=True is for the loader of yours"):
        course(mine(), Recipe(batch_size=10, drop_last=True))


def test_a_sample_that_is_not_finite_is_found():
    bad = [(inputs * torch.nan if index == 7 else inputs, target) for index, (inputs, target) in enumerate(POINTS)]
    make, in_pairs = [torch.utils.data.default_collate(bad[i : i + 10]) for i in range(0, 40, 10)], "unsplittable"
    recipe = Recipe(on_nonfinite="skip", epochs=3)
    history = course(mine(make, functools.partial(step, form=in_pairs), recipe=recipe))
    assert history.skipped[0]["why"] == "the batch itself is not finite first for sample 7" and history.steps == 9


def test_plans_are_compared_and_profiled():
    result = compare(mine(), Plan(), Plan(workers=2), device="cpu", pairs=4)
    assert result.losses_a == result.losses_b
    assert sum(row["share"] for row in profile(mine(), device="cpu")["rows"]) == pytest.approx(1)


# ---- quality ----


def test_quality_is_what_evaluate_says_or_else_the_losses():
    def right(model):
        assert not model.training
        return (model(INPUTS).argmax(1) == (INPUTS[:, 0] > 0)).float().mean().item()

    history = course(mine(evaluate=right, metric="accuracy"))
    assert history.evaluation == {"metric": "accuracy", "value": pytest.approx(right(history.model.eval())), "n": 1}
    for options, metric in (({}, "training loss"), ({"test": loader(shuffle=False)}, "test loss")):
        work = mine(**options)
        curves = [curve(work, dataclasses.replace(work.recipe, seed=seed), None, device="cpu") for seed in (0, 1)]
        quality = quality_of(work, {"baseline": curves, "final": curves})
        assert quality["metric"] == metric and quality["decision"] in ("as good", "not decided")
        assert quality["margin"] == pytest.approx(0.02 * sum(run["value"] for run in curves) / 2)


# ---- what cannot be trained on ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"step": lambda model, batch: 0.5}, "step returned float: it has to return the loss"),
        ({"step": lambda model, batch: model(batch[0])}, r"step returned a tensor \[10, 2\]: it has to"),
        ({"make": [{"name": "a"}]}, r"a batch \(dict\) holds no tensor \[B, ...\]"),
        ({"make": []}, "the loader ends before its first batch"),
        ({"make": lambda seed: iter([])}, "the loader ends before its first batch"),
        ({"make": 3}, "int cannot be gone over again and again: give a DataLoader"),
        ({"make": iter([1])}, "list_iterator cannot be gone over again and again"),
        (
            {"make": lambda seed: (INPUTS for _ in range(3))},
            r"the loader has no length: say how far to train, as recipe=Recipe\(steps",
        ),
    ],
)
def test_what_gives_no_loss_or_no_batch_is_one_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        course(mine(**options))
