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
from torch.utils.data import DataLoader

from speedkit import fit, from_loader
from speedkit.errors import PlanError, UsageError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

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
    history = course(mine([*loader()]), plan={"workers": 2, "cache": "ram"})
    [workers, cache] = sorted(history.effective.fallbacks, key=lambda fallback: fallback.field, reverse=True)
    assert "a list makes its batches" in workers.why and "no items" in cache.why
    with pytest.raises(PlanError, match="the loader of yours makes batches of 10: set it there"):
        course(mine(), Recipe(batch_size=5))
    with pytest.raises(PlanError, match="drop_last=True is for the loader of yours"):
        course(mine(), Recipe(batch_size=10, drop_last=True))


WORKER = {"num_workers": 1, "timeout": 60, "multiprocessing_context": "fork"}  # a timeout takes workers


@pytest.mark.parametrize("made_by", [list, lambda loader: loader], ids=["list", "loader"])
def test_a_sample_that_is_not_finite_is_found(made_by):
    bad = [(inputs * torch.nan if index == 7 else inputs, target) for index, (inputs, target) in enumerate(POINTS)]
    make, in_pairs = made_by(DataLoader(bad, batch_size=10, **WORKER)), "unsplittable"
    recipe = Recipe(on_nonfinite="skip", epochs=3)
    history = course(mine(make, functools.partial(step, form=in_pairs), recipe=recipe))
    assert history.skipped[0]["why"] == "its batch is not finite for sample 7" and history.steps == 9


def test_quality_is_what_evaluate_says():
    def right(model):
        assert not model.training
        return (model(INPUTS).argmax(1) == (INPUTS[:, 0] > 0)).float().mean().item()

    history = course(mine(evaluate=right, metric="accuracy"))
    assert history.evaluation == {"metric": "accuracy", "value": pytest.approx(right(history.model.eval())), "n": 1}


def endless(seed):
    while True:
        yield from loader()


def test_batches_without_an_end_are_learned_from_and_some_of_them_tested_on():
    history = course(mine(endless, test=endless, recipe=Recipe(steps=40, epochs=None, learning_rate=1e-2)))
    assert history.steps == 40 and history.loss[-1] < history.loss[0] / 2
    assert (history.evaluation["metric"], history.evaluation["n"]) == ("test loss", 200)


# ---- what cannot be trained on ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"step": lambda model, batch: 0.5}, "step returned float: it has to return the loss"),
        ({"step": lambda model, batch: model(batch[0])}, r"step returned a tensor \[10, 2\]: it has to"),
        ({"make": [{"name": "a"}]}, r"a batch \(dict\) holds no tensor \[B, ...\]"),
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
