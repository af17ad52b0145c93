"""A model and a loader of one's own are tuned, and judged by their losses."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from speedkit import Plan, Recipe, compare, from_loader, tune
from speedkit.errors import UsageError
from speedkit.lab.records import validate_record
from speedkit.lab.report import in_short
from speedkit.lab.tuning import usual_budget_s
from speedkit.machine import Hardware
from speedkit.measure.quality import curve, quality_of

INPUTS = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
POINTS = list(zip(INPUTS, (INPUTS[:, 0] > 0).long(), strict=True))


def loader(seed=0):
    return DataLoader(POINTS, batch_size=10, shuffle=True)


def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def talkative():
    print("number of parameters: 18")
    return nn.Linear(8, 2)


def mine(**options):
    return from_loader(talkative, loader, step, recipe=Recipe(epochs=3, learning_rate=1e-2), **options)


@pytest.mark.slow
def test_a_loader_is_tuned_without_what_is_for_items_and_without_what_the_model_prints(tmp_path, capsys):
    options = {"optimizations": ["workers", "cache", "bucket", "precision"], "pairs": 10, "seeds": 2}
    record = tune(mine(), device="cpu", out=tmp_path / "tune", budget_s=60, **options)
    assert validate_record(record) == []
    why = {row["optimization"]: row["why"] for row in record["optimizations"]}
    assert {row["promises"] for row in record["optimizations"] if row["optimization"] == "workers"} == {"order-equal"}
    assert "no items" in why["cache"] and "no items" in why["bucket"] and in_short(record)
    assert "number of parameters" not in capsys.readouterr().out


def test_what_is_made_of_a_tuning_s_record_is_part_of_its_budget():
    with pytest.raises(UsageError, match="a budget of 60 s is too short"):
        tune(mine(), device="cpu", budget_s=60, reserved_s=60, optimizations=["workers"], pairs=4, progress=False)


def test_a_tuning_takes_longer_where_others_use_the_cores():
    two, gpu = Hardware(threads=2), Hardware(threads=2, device=torch.device("cuda"))
    for used, budget_s in ((0.0, 240.0), (0.2, 240.0), (1.0, 480.0)):
        assert usual_budget_s(two, "mine", look=lambda used=used: {"encoder": used}) == budget_s
    assert usual_budget_s(gpu, "mine", look=lambda: {"encoder": 1.0}) == 240.0
    assert usual_budget_s(Hardware(threads=64), "mine", look=lambda: {"encoder": 60.0}) == 480.0
    assert usual_budget_s(gpu, "speech") == 330.0


def test_plans_are_compared_by_their_names():
    compared = compare(mine(), "baseline", "careful", device="cpu", pairs=2)
    assert (compared.effective_a.asked, compared.effective_b.asked) == (Plan(), Plan.careful())


@pytest.mark.parametrize(("options", "metric"), [({}, "training loss"), ({"test": loader()}, "test loss")])
def test_without_a_margin_losses_within_two_percent_are_as_good(options, metric):
    work = mine(**options)
    curves = [curve(work, dataclasses.replace(work.recipe, seed=seed), Plan(), device="cpu") for seed in (0, 1)]
    quality = quality_of(work, {"baseline": curves, "final": curves})
    assert quality["metric"] == metric and quality["decision"] in ("as good", "not decided")
    assert quality["margin"] == pytest.approx(0.02 * sum(run["value"] for run in curves) / 2)
