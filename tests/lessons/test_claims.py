"""Claims: the rule that judges them, what each record answers, and nothing stale or foreign shown as an answer."""

import re
from pathlib import Path

import pytest
import small_notebooks
from publish import record_of

from speedkit.errors import SpeedkitError
from speedkit.files import write_json
from speedkit.lab.provenance import code_of
from speedkit.lab.record import read_notebook, start
from speedkit.lessons.claims import NOT_MEASURED, answer, answers, gather, judge, read_claims

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ANSWERED_BY_WORKLOAD = {"90_tune"}  # its records answer the claims on their own workload, together all of them
BF16 = {"name": "bf16", "ratio": 2.05, "low": 1.9, "high": 2.2, "decision": "faster"}


@pytest.mark.parametrize(
    ("promise", "interval", "verdict"),
    [
        ((2.0, 3.0), (1.9, 2.1), "confirmed"),  # interval and promise overlap
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


def test_judge_records_the_verdict_and_its_evidence():
    run = start("21_small", scale="smoke", device="cpu")
    judge(run, "C04", BF16, needs_gpu=True)
    judge(run, "C02", BF16)  # one figure, read with its tolerance
    judge(run, "C42", BF16)  # no figure
    verdicts = {row["claim"]: (row["verdict"], row["measurement"]) for row in run.record["verdicts"]}
    assert verdicts == {"C04": ("needs_gpu", "bf16"), "C02": ("confirmed", "bf16"), "C42": ("confirmed", "bf16")}
    assert "promised 1.71 to 2.09x, measured 2.05x" in run.record["verdicts"][1]["check"]


CLAIM = {"technique": "a switch", "plan_field": "precision", "metric": "speedup", "guide": ""}
CLAIMS = {"C01": CLAIM | {"low": "1.9", "high": "1.9"}, "C02": CLAIM | {"metric": "memory", "low": "-50", "high": ""}}


def test_every_claim_has_a_row_for_each_record_that_answers_it_and_one_where_none_does(tmp_path, monkeypatch):
    folder = small_notebooks.make_checkout(tmp_path, monkeypatch)
    small_notebooks.whole(folder / "21_tiny.ipynb")
    small_notebooks.commit(tmp_path)
    whole = small_notebooks.a_record("21_tiny")
    answered = {"claim": "C01", "verdict": "needs_gpu", "check": "why", "measurement": "bf16"}
    elsewhere = whole | {"hardware": whole["hardware"] | {"cpu": "another CPU"}, "verdicts": [answered]}
    elsewhere["measurements"] = [BF16 | {"a": "a", "b": "b", "seconds_a": [1.0], "seconds_b": [1.0]}]
    there = folder / "records" / "there"
    there.mkdir(parents=True)
    write_json(there / "21_tiny.json", elsewhere)
    write_json(there / "21_tiny-image.json", elsewhere | {"commit": "0123456"})
    rows = answers(CLAIMS, gather(folder), lambda record: record["hardware"]["cpu"])
    keys = ("claim", "device", "verdict", "workload", "stale", "ratio", "promised_low")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("C01", "another CPU", "needs a GPU", "", False, 2.05, pytest.approx(1.71)),  # one figure is widened
        ("C01", "another CPU", "needs a GPU", "image", True, 2.05, pytest.approx(1.71)),
        ("C02", "", NOT_MEASURED, "", False, None, -50.0),
    ]
    assert gather(folder, but=elsewhere) == [], "what this machine's run replaces is left out"
    write_json(there / "21_tiny-later.json", elsewhere | {"scale": "full"})
    with pytest.raises(SpeedkitError, match=r"21_tiny-later\.json is not valid"):
        gather(folder)


# ---- the notebooks as they are ----


def claims_named(notebook):
    """Return the ids of the claims that a notebook's code answers: those it holds as strings, such as "C01"."""
    code = re.sub("#.*", "", "\n".join(code_of(read_notebook(notebook))))
    return set(re.findall(r"""["'](C\d\d)["']""", code))


def test_every_claim_is_answered_by_a_notebook():
    assert set().union(*map(claims_named, NOTEBOOKS)) == set(read_claims())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_answers_exactly_the_claims_that_its_code_names(path):
    shown = record_of(read_notebook(path))
    answered = {row["claim"] for row in shown["verdicts"]} - {None}
    part = path.stem in ANSWERED_BY_WORKLOAD
    assert answered <= claims_named(path) if part else answered == claims_named(path)
