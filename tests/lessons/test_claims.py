"""Claims: the rule that judges them, what each record answers, and nothing stale or foreign shown as an answer."""

from pathlib import Path

import pytest
import small_notebooks
from publish import record_of

from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json
from speedkit.lab.record import read_notebook
from speedkit.lessons.claims import (
    ANY_GAIN,
    NEEDS_GPU,
    NOT_MEASURED,
    Reading,
    answer,
    answer_of_value,
    answers,
    gather,
    read_claims,
    same_or_not,
    widened,
)

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BF16 = {"name": "bf16", "ratio": 2.05, "low": 1.9, "high": 2.2, "decision": "faster"}


@pytest.mark.parametrize(
    ("promise", "interval", "verdict"),
    [
        ((2.0, 3.0), (2.1, 2.9), "confirmed"),  # all of the interval is in the promise
        ((2.0, 3.0), (1.9, 2.1), "not refuted"),  # part of it is
        (ANY_GAIN, (1.03, 9.0), "confirmed"),
        (ANY_GAIN, (0.97, 1.01), "smaller"),
        ((2.0, 3.0), (1.4, 1.5), "smaller"),
        ((2.0, 3.0), (3.2, 3.5), "larger"),
        ((1.1, 1.3), (0.95, 1.2), "unresolved"),  # includes 1, and part of the promise
        ((2.0, 3.0), (0.7, 0.8), "contradicted"),  # slower
        ((0.81, 0.99), (0.5, 0.6), "larger"),  # a stated cost
        ((0.81, 0.99), (1.1, 1.2), "contradicted"),
    ],
)
def test_rule_on_claims(promise, interval, verdict):
    assert answer(promise, dict(zip(("low", "high"), interval, strict=True))) == verdict


@pytest.mark.parametrize(
    ("promise", "value", "rule", "verdict"),
    [
        ((-50.0, -40.0), -45.0, False, "confirmed"),
        ((-50.0, -40.0), -10.0, False, "smaller"),
        ((-50.0, -40.0), -60.0, False, "larger"),
        ((-50.0, -40.0), 0.0, False, "smaller"),
        ((-50.0, -40.0), 5.0, False, "contradicted"),
        ((80.0, 100.0), 40.0, False, "smaller"),
        ((0.0, 1000.0), -11.0, True, "contradicted"),
        ((0.0, 0.0), True, True, "contradicted"),  # a check that passes where it should not
    ],
)
def test_rule_on_shares_changes_and_rules(promise, value, rule, verdict):
    assert answer_of_value(promise, value, rule=rule) == verdict


@pytest.mark.parametrize(("low", "word"), [(1.2, "overlap"), (1.4, "apart")])
def test_two_intervals_are_told_apart_or_not(low, word):
    one, other = {"low": 1.0, "high": 1.3}, {"low": low, "high": 1.5}
    assert word in same_or_not(one, other)
    assert same_or_not(one, other) == same_or_not(other, one)


def test_one_figure_is_read_with_its_tolerance():
    assert widened(1.9, 1.9) == pytest.approx((1.71, 2.09)) and widened(-75, -75) == pytest.approx((-82.5, -67.5))


CLAIM = {"technique": "a switch", "plan_field": "precision", "metric": "speedup", "guide": "", "lesson": "21_tiny"}
CLAIMS = {
    "C01": CLAIM | {"low": "2.0", "high": "3.0", "measurement": "bf16", "needs": ""},
    "C02": CLAIM | {"low": "", "high": "", "measurement": "bf16", "needs": ""},  # offered with no figure
    "C03": CLAIM | {"low": "1.9", "high": "1.9", "measurement": "bf16", "needs": "gpu"},
    "C04": CLAIM | {"low": "-50", "high": "-40", "measurement": "kept.percent", "needs": "", "metric": "memory"},
    "C05": CLAIM | {"low": "1.9", "high": "1.9", "measurement": "", "needs": ""},
}


def test_every_claim_has_a_row_for_each_record_of_its_lesson_and_one_where_none_answers(tmp_path, monkeypatch):
    folder = small_notebooks.make_checkout(tmp_path, monkeypatch)
    small_notebooks.whole(folder / "21_tiny.ipynb")
    small_notebooks.commit(tmp_path)
    whole = small_notebooks.a_record("21_tiny")
    elsewhere = whole | {"hardware": whole["hardware"] | {"cpu": "another CPU"}, "commit": "0123456"}
    elsewhere["measurements"] = [BF16 | {"a": "a", "b": "b", "seconds_a": [1.0], "seconds_b": [1.0]}]
    elsewhere["tables"] = {"kept": [{"percent": -10.0}]}
    there = folder / "records" / "there"
    there.mkdir(parents=True)
    write_json(there / "21_tiny.json", elsewhere)
    rows = answers(CLAIMS, gather(folder), lambda record: record["hardware"]["cpu"])
    keys = ("claim", "device", "verdict", "stale", "ratio", "value")
    assert [tuple(row[key] for key in keys) for row in rows if row["device"] in ("", "another CPU")] == [
        ("C01", "another CPU", "not refuted", True, 2.05, None),
        ("C02", "another CPU", "confirmed", True, 2.05, None),
        ("C03", "another CPU", NEEDS_GPU, True, None, None),
        ("C04", "another CPU", "smaller", True, None, -10.0),
        ("C05", "", NOT_MEASURED, False, None, None),
    ]
    assert gather(folder, but=elsewhere) == [], "what this machine's run replaces is left out"
    write_json(there / "21_tiny-later.json", elsewhere | {"scale": "full"})
    with pytest.raises(SpeedkitError, match=r"21_tiny-later\.json is not valid"):
        gather(folder)


# ---- the notebooks as they are ----


def test_what_a_claim_names_is_in_the_record_of_its_lesson():
    claims = read_claims()
    readings = [Reading(record_of(read_notebook(path)), True) for path in NOTEBOOKS]
    unanswered = {row["claim"] for row in answers(claims, readings, str) if row["verdict"] == NOT_MEASURED}
    there = {reading.lesson for reading in readings}
    assert {claim["lesson"].partition("-")[0] for claim in claims.values()} <= {path.stem for path in NOTEBOOKS}
    for name, claim in claims.items():
        answered = claim["lesson"] in there and bool(claim["measurement"] or claim["needs"])
        assert answered == (name not in unanswered), name


def test_a_claim_about_quality_has_no_value_where_the_plan_was_not_tested():
    path = next((FOLDER / "records").glob("*/90_tune-image.json"))
    record = read_json(path)
    record["quality"] |= {"decision": "not tested", "mean_change": None}
    [row] = answers({"C30": read_claims()["C30"]}, [Reading(record, True)], str)
    assert (row["verdict"], row["value"]) == ("unresolved", None)
