"""Folklore: what each record answers, every claim in its place, and nothing stale or foreign shown as an answer."""

import re
from pathlib import Path

import nbformat
import pytest
from check_notebooks import executed

from speedkit.files import read_json, write_json
from speedkit.measure.folklore import NOT_MEASURED, WORDS, Reading, answers, gather
from speedkit.measure.provenance import strip_comments
from speedkit.measure.record import answer, code_cells, promised, read_claims, read_notebook, record_of
from speedkit.measure.schema import SCHEMA

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NOT_THERE_YET = {"C24": "41_int8_inference", "C25": "40_several_gpus"}
ANSWERED_BY_WORKLOAD = {"90_climb"}  # its records answer the claims on their own workload, together all of them


def claim(name, metric="speedup", low="2.0", high="3.0", unit="x"):
    return {
        "id": name,
        "technique": "a switch",
        "plan_field": "precision",
        "metric": metric,
        "low": low,
        "high": high,
        "unit": unit,
        "context": "",
        "guide": "a guide",
    }


CLAIMS = {
    "C01": claim("C01"),
    "C02": claim("C02", low="1.9", high="1.9"),
    "C03": claim("C03", low="", high=""),
    "C05": claim("C05", "peak memory", "-50", "-40", "%"),
    "C06": claim("C06", "rule", "", "", ""),
}
MEASURED = "promised 2.00 to 3.00x, measured 2.05x (1.90 to 2.20)"
BF16 = {"name": "bf16", "ratio": 2.0546, "low": 1.9012, "high": 2.2049}
OTHER = {"name": "other", "ratio": 1.0, "low": 0.9, "high": 1.1}


def record(*verdicts, gpu="", notebook="21_small", created="2026-01-02T03:04:05+00:00"):
    keys = ("claim", "verdict", "check", "measurement", "value")
    rows = [dict(zip(keys, verdict, strict=False)) for verdict in verdicts]
    return {
        "notebook": notebook,
        "created": created,
        "hardware": {"gpu": gpu, "cpu": "a CPU", "cores": 2},
        "measurements": [OTHER, BF16],
        "verdicts": rows,
    }


def rows_of(*readings):
    return answers(CLAIMS, readings, lambda record: record["hardware"]["gpu"] or "CPU")


def test_every_claim_has_a_row_for_each_device_that_answers_it_and_one_where_none_does():
    cpu = record(("C01", "needs_gpu", MEASURED, "bf16"), (None, "passed", "a check"))
    gpu = record(("C01", "confirmed", MEASURED, "bf16"), gpu="GPU")
    rows = rows_of(Reading(cpu, False, "cpu-2-cores/21_small-image"), Reading(gpu, True, "gpu/21_small"))
    shown = [tuple(row[key] for key in ("claim", "device", "verdict", "workload", "stale")) for row in rows]
    assert shown[:2] == [("C01", "GPU", "confirmed", "", False), ("C01", "CPU", "needs a GPU", "image", True)]
    assert shown[2:] == [(name, "", NOT_MEASURED, "", False) for name in ("C02", "C03", "C05", "C06")]
    low, high = ([row[f"promised_{end}"] for row in rows[1:]] for end in ("low", "high"))
    assert (low[0], high[0]) == (2.0, 3.0)
    assert (low[1], high[1]) == pytest.approx((1.71, 2.09)), "one figure is read widely"
    assert low[2:] == [None, -50.0, None] and high[2:] == [None, -40.0, None]
    assert all(rows[0][key] == BF16[key] for key in ("ratio", "low", "high"))


def test_a_verdict_s_figures_are_those_of_the_measurement_that_it_names():
    named, share = ("C01", "confirmed", MEASURED, "bf16"), ("C05", "smaller", "falls by 41 %", None, -41.0)
    rows = {row["claim"]: row for row in rows_of(Reading(record(named, share, ("C06", "confirmed", "why")), True))}
    figures = {name: [row[key] for key in ("ratio", "low", "high", "value")] for name, row in rows.items()}
    assert figures["C01"] == [BF16["ratio"], BF16["low"], BF16["high"], None]
    assert figures["C05"] == [None, None, None, -41.0]
    assert figures["C06"] == figures["C02"] == [None] * 4


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    """Notebooks of which one was run here; a record of it, one of another form, one of other code, one torn."""
    notebooks = tmp_path / "notebooks"
    path = executed(notebooks / "21_tiny.ipynb")
    whole = record_of(nbformat.read(path, as_version=4))
    (notebooks / "records" / "there").mkdir(parents=True)
    elsewhere = whole | {"hardware": whole["hardware"] | {"cpu": "another CPU"}}
    odd = {"claim": "C01", "check": "x", "verdict": "perhaps"}
    contents = {
        "21_tiny": {},
        "21_tiny-old": {"code_sha256": "0" * 64},
        "22_later": {"schema": 2},
        "23_odd": {"verdicts": [odd]},
    }
    for name, change in contents.items():
        write_json(notebooks / "records" / "there" / f"{name}.json", elsewhere | change)
    (notebooks / "records" / "there" / "24_torn.json").write_text("{")
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(notebooks))
    return notebooks


def test_records_that_cannot_be_read_are_a_sentence_each_and_cost_nothing_else(folder):
    readings, problems = gather(folder)
    assert {file: current for _, current, file in readings} == {"there/21_tiny": True, "there/21_tiny-old": False}
    assert [problem.split(" (")[0] for problem in problems] == [
        "there: record 22_later.json is not valid",
        "there: record 23_odd.json is not valid",
        "there: record 24_torn.json cannot be read",
    ]
    assert "schema: 1 was expected" in problems[0] and "'perhaps' is not one of" in problems[1]
    assert all(problem.endswith("publish its notebook again") for problem in problems)


def test_what_a_run_replaces_is_left_out(folder):
    own = read_json(folder / "records" / "there" / "21_tiny.json")
    assert gather(folder, but=own)[0] == []
    assert len(gather(folder, but=own | {"notebook": "50_folklore"})[0]) == 2


# ---- the notebooks as they are ----


def claims_named(notebook):
    """Return the ids of the claims that a notebook's code answers: those it holds as strings, such as "C01"."""
    code = "\n".join(strip_comments(cell.source) for cell in code_cells(read_notebook(notebook)))
    return set(re.findall(r"""["'](C\d\d)["']""", code))


def test_verdicts_are_the_record_s_words():
    words = SCHEMA["properties"]["verdicts"]["items"]["properties"]["verdict"]["enum"]
    assert {*WORDS, "passed", "failed"} == set(words)


def test_every_claim_is_answered_by_a_notebook():
    named = set().union(*map(claims_named, NOTEBOOKS))
    planned = {name for name, notebook in NOT_THERE_YET.items() if not (FOLDER / f"{notebook}.ipynb").exists()}
    assert named == set(read_claims()) - planned


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_answers_exactly_the_claims_that_its_code_names(path):
    shown = record_of(nbformat.read(path, as_version=4))
    assert shown, "it was not run"
    answered = {row["claim"] for row in shown["verdicts"]} - {None}
    if path.stem in ANSWERED_BY_WORKLOAD or shown["profile"] == "smoke":  # which leaves out what takes long
        assert answered <= claims_named(path)
    else:
        assert answered == claims_named(path)


def test_every_speedup_that_was_judged_is_found_with_its_measurement_and_verdict():
    readings, problems = gather(FOLDER)
    assert problems == []
    claims = read_claims()
    rows = answers(claims, readings, lambda record: record["hardware"]["cpu"])
    judged = [
        row
        for row in rows
        if row["evidence"].startswith("promised")
        and row["metric"] == "speedup"
        and claims[row["claim"]]["low"] != "linear"
    ]  # which its notebook judges by the number of ranks
    assert judged and all(row["ratio"] for row in judged)
    for row in judged:
        assert row["verdict"] in (WORDS[answer(promised(row["claim"]), row)], WORDS["needs_gpu"]), row["claim"]


def test_the_map_in_notebook_00_names_every_notebook():
    start = FOLDER / "00_start_here.ipynb"
    code = "\n".join(cell.source for cell in nbformat.read(start, as_version=4).cells)
    assert [path.stem for path in NOTEBOOKS if f'"{path.stem}": ' not in code] == []
