"""How equal quality is decided: by which trainings, on how much of a schedule, in which looks."""

import dataclasses
import functools
import types

import pytest
import tiny
import torch

from speedkit.measure.quality import curve, curves_file, favoured_test, fold, quality_of
from speedkit.measure.stages import Stage, Tuning
from speedkit.measure.trainings import choose_schedule, course_of, train_both
from speedkit.plan import Plan
from speedkit.recipe import learning_rates

BEST = Plan(cache="disk")


@pytest.fixture(autouse=True)
def kept_apart(tmp_path, monkeypatch):
    """Trainings that are kept by one test are not another's."""
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path / "cache"))


def job(work, *, said=None, **options):
    limits = {"budget_s": 1000.0, "pairs": 20, "seeds": 3, "horizon": 10_000, "hardware": tiny.CPU, "out": None}
    where = {"device": "cpu", "cache_dir": None}
    say = [].append if said is None else said.append
    return Tuning(workload=work, recipe=work.recipe, options=where, say=say, **limits | options)


def run(score, loss=0.1):
    return {"value": score, "loss": loss, "seconds": 1.0, "step_s": 0.1, "quarantined": {}}


def curves(baseline, final, losses=(0.1, 0.1, 0.1)):
    rows = [run(score, loss) for score, loss in zip(final, losses, strict=False)]
    return {"baseline": [run(score) for score in baseline], "final": rows}


# ---- what trainings show ----


def test_a_training_says_what_its_steps_take_apart_from_evaluation_and_compiling(monkeypatch):
    """By a clock that stands still but in the loss, and longest in the first step."""
    now_s = 0.0

    def loss(model, batch, recipe):
        nonlocal now_s
        took_s = 1.0 if model.training else 10.0
        now_s += took_s if now_s else 100.0
        return tiny.loss(model, batch, recipe)

    monkeypatch.setattr("speedkit.train.run.time", types.SimpleNamespace(perf_counter=lambda: 1.0 + now_s))
    work = dataclasses.replace(tiny.points(train=64, test=32), loss=loss)  # 2 epochs of 4 steps, 2 batches to test on
    row = curve(work, work.recipe, Plan(), device="cpu")
    assert (row["step_s"], row["evaluation_s"]) == pytest.approx((1.0, 8 * 2 * 10.0))
    assert row["seconds"] == pytest.approx(row["prepare_s"] + 100.0 + 7 * 1.0 + row["evaluation_s"])


@pytest.mark.parametrize(
    ("final", "decision", "seeds"),
    [
        ([0.900, 0.905, 0.905], "as good", None),
        ([0.85, 0.86, 0.86], "worse", None),
        ([0.99, 0.80, 0.92], "not decided", 94),
        ([0.90], "not tested", None),
    ],
)
def test_quality_is_shown_not_assumed(final, decision, seeds):
    quality = quality_of(tiny.points(test=400), curves([0.90, 0.905, 0.90], final))
    assert (quality["decision"], quality["seeds_needed"]) == (decision, seeds)


def test_few_test_items_are_judged_in_folds_and_by_the_probability_of_the_right_class():
    work, large = tiny.points(train=80, test=20), tiny.points(train=80, test=400)
    folds = [fold(work, number) for number in range(6)]
    assert folds[0] is work is folds[5] and fold(large, 1) is large
    everything = sorted(item.path for item in [*work.train, *work.test])
    assert sorted(item.path for one in folds[:5] for item in one.test) == everything
    assert all(sorted(item.path for item in [*one.train, *one.test]) == everything for one in folds)
    # Folds differ by more than plans do: pairs cancel that, and three are not enough to tell flips of single items.
    scores, flipped = [0.80, 0.95, 0.85], [0.82, 0.93, 0.85]
    assert quality_of(work, curves(scores, [0.80, 0.95, 0.853]))["decision"] == "as good"
    shown = quality_of(work, curves(scores, flipped))
    assert shown["decision"] == "as good" and shown["lower"] < -work.margin < shown["likelihood"]["lower"]
    undecided = quality_of(work, curves(scores, flipped, losses=[0.05, 0.10, 0.15]))
    assert undecided["decision"] == "not decided" and undecided["items_needed"] > 60
    # Scores of so few items are often the same number in each training: that shows nothing by itself.
    none_right = quality_of(tiny.points(train=2, test=1), curves([0.0] * 3, [0.0] * 3, losses=[0.1, 0.3, 0.1]))
    assert none_right["decision"] == "not decided" and none_right["items_needed"] > 100
    # A likelihood that is the same does not make up for a score that may well be worse.
    for scores_of_worse in ([0.80, 0.90, 0.78], [0.85, 0.90, 0.82]):
        assert quality_of(work, curves(scores, scores_of_worse))["decision"] == "not decided"
    # Of two ways to pass, each has half the error.
    changed = [0.80, 0.95, 0.859]
    assert quality_of(large, curves(scores, changed))["lower"] > quality_of(work, curves(scores, changed))["lower"]


def test_kept_trainings_choose_the_test_that_suits_them():
    work, seeds = tiny.points(test=400), [0.90, 0.85, 0.95]
    alike, unlike = curves(seeds, [0.91, 0.85, 0.95]), curves([*seeds, 0.9, 0.88, 0.92], [0.90, 0.95, 0.85])
    assert [favoured_test(work, kept) for kept in (alike, unlike, curves(seeds, []))] == ["paired", "Welch", "paired"]
    assert favoured_test(tiny.points(test=20), unlike) == "paired", "folds differ"


def test_trainings_are_kept_for_the_same_recipe_and_plan_and_no_other():
    work, other_loss = tiny.points(), tiny.slowed(tiny.points(), 0.0)
    longer = dataclasses.replace(work, recipe=dataclasses.replace(work.recipe, epochs=9))
    several = [(work, Plan()), (tiny.points(), Plan()), (longer, Plan()), (other_loss, Plan()), (work, BEST)]
    files = [curves_file(one, one.recipe, plan, hardware=tiny.CPU) for one, plan in several]
    assert files[0] == files[1] and len(set(files)) == 4
    model = torch.nn.Linear(4, 2)
    model.forward = functools.partial(model.forward)  # as `prepare` leaves it: the model holds itself
    prepared = dataclasses.replace(work, model=lambda: model)
    assert curves_file(prepared, work.recipe, Plan(), hardware=tiny.CPU) is None


# ---- how much is trained ----

STEP_S = {"baseline": 1.0, "final": 0.5}


@pytest.mark.parametrize(
    ("budget_s", "steps", "test_items"),
    # A whole training of both takes 1.5 s x (240 steps + half of the 200 that 8 evaluations of 400 items are).
    [(1600, 240, 400), (1000, 120, 400), (800, 80, 200), (300, 16, 200), (200, None, 200)],
)
def test_as_much_of_the_schedule_is_trained_as_the_time_allows(budget_s, steps, test_items):
    work = tiny.points(train=640, test=400, epochs=6)
    of = job(work, budget_s=budget_s)
    chosen = choose_schedule(of, BEST, STEP_S, reserved=False)
    course = course_of(of, chosen["one_in"])
    assert (chosen["until_s"] is None) == (steps is None)
    assert course.recipe.total_steps(640) == (steps or 12)
    assert len(course.workload.test) == test_items
    rates = learning_rates(course.recipe, course.recipe.total_steps(640))
    assert max(rates) == pytest.approx(work.recipe.learning_rate, rel=0.2) and rates[-1] < 1e-4 * max(rates)


def test_what_other_stages_used_up_leaves_a_quarter_of_the_budget_for_trainings():
    of = job(tiny.points(train=640, test=400, epochs=6), budget_s=1200.0)
    of.state["spent_s"] = 1200.0
    chosen = [choose_schedule(of, BEST, STEP_S, reserved=reserved) for reserved in (True, False)]
    assert chosen[0]["until_s"] == pytest.approx(1500.0, abs=1.0) and chosen[1]["until_s"] is None
    quality = train_both(of, BEST, STEP_S, name="safe")["quality"]  # for one that replaces another none are left
    assert quality["decision"] == "not tested" and quality["budget_s"] > 1200.0 and quality["final"] == []


SCORES = [0.90, 0.91, 0.89, 0.90, 0.90, 0.91, 0.89, 0.90]


def recorded(work, changes, **options):
    """A tuning whose trainings have been recorded, the final plan's with these changes of the SCORES, and what it says.

    Any other training is a real one, and ends at other scores.
    """
    said = []
    of = job(work, said=said, **options)
    for number, (score, change) in enumerate(zip(SCORES, changes, strict=False)):
        for name, value in (("baseline for final", score), ("final", score + change)):
            of.results[Stage("training", plan=name, seed=number)] = run(value)
    return of, said


WORK = tiny.points(train=64, test=400)
SCATTERED = [0.006, -0.006, 0.006, -0.006, 0.006, -0.006]


@pytest.mark.parametrize(
    ("changes", "count", "decision"),
    [(SCATTERED, 4, "as good"), ([0.0, 0.001, 0.0], 3, "as good"), ([0.1, -0.1] * 4, 8, "not decided")],
)
def test_trainings_go_on_one_by_one_until_a_look_decides_and_are_kept(changes, count, decision):
    of, _ = recorded(WORK, changes)
    trained = train_both(of, BEST, STEP_S)
    quality = trained["quality"]
    assert (len(quality["final"]), quality["decision"]) == (count, decision)
    assert (quality["test"], quality["schedule"], quality["test_items"]) == ("paired", 1.0, 400)
    assert trained["training_step_s"] == {"baseline": 0.1, "final": 0.1}
    # The next tuning that comes to this plan trains nothing: what was kept of both decides, by the test that suits it.
    again = train_both(job(WORK, budget_s=1e-9), BEST, STEP_S)["quality"]
    assert again["final"] == quality["final"] and again["decision"] == decision


def test_the_last_look_spends_the_error_that_is_left_where_the_time_is_up():
    of, _ = recorded(WORK, SCATTERED[:3])
    of.results[Stage("training", plan="baseline for final", seed=2)]["seconds"] = 1e6
    trained = train_both(of, BEST, STEP_S)["quality"]
    expected = quality_of(WORK, curves(SCORES[:3], trained["final"]))
    assert len(trained["final"]) == 3 and trained.items() >= expected.items()


@pytest.mark.slow
def test_a_shorter_schedule_is_trained_for_real_and_the_quality_says_what_share_it_was():
    work = tiny.points(train=640, test=400, epochs=6)
    said = []
    quality = train_both(job(work, said=said, budget_s=800), BEST, STEP_S)["quality"]
    assert (quality["schedule"], quality["steps"], quality["test_items"]) == (1 / 3, 80, 200)
    assert quality["decision"] == "as good" and len(quality["final"]) == 3, "a cache trains to the same bits"
    assert any("80 steps instead of 240" in line for line in said)
