"""The report of a tuning: what it says, and that a browser loads and runs nothing of what a record may hold."""

import re

import pytest

from speedkit.lab.report import in_short, payback_in_words, quality_in_words, write_report

HOSTILE = "<script>document.title = 'run'</script><img src=https://example.org/x onerror=document.title='run'>"
QUALITY = {"metric": "accuracy", "margin": 0.03, "baseline": [0.9] * 3, "final": [0.9] * 3, "mean_change": 0.001}
QUALITY |= {"lower": -0.012, "decision": "as good", "likelihood": None, "seeds_needed": None, "items_needed": None}
FEW_ITEMS = {"decision": "not decided", "likelihood": {"mean_change": 0.01, "lower": -0.05}}
FEW_ITEMS |= {"seeds_needed": 11, "test_items": 80, "items_needed": 880}
PAYBACK = {"epochs": 30, "baseline_s": 7200.0, "final_s": 1800.0, "prepare_s": {"cache": 60.0, "compile": 30.0}}
PAYBACK |= {"pays_back_after_s": 125.0}


@pytest.fixture
def record(tuning):
    """Of a tuning whose headline is over the careful plan."""
    careful = {"ratio": 2.98, "low": 2.9, "high": 3.1}
    return tuning | {"speedup": {"ratio": 3.9, "low": 3.8, "high": 4.0}, "speedup_careful": careful}


def test_the_report_says_what_to_switch_on_and_what_it_gives(record, tmp_path):
    text = write_report(record, tmp_path / "report.html").read_text()
    order = ["<code>cache</code>", "plan.yaml", "Lightning", "2.98 times as fast (2.90", "careful plan", "decoder"]
    assert re.search(".*".join(map(re.escape, order)), text, re.DOTALL)
    assert set(re.findall(r'src="([^",]{12})', text)) == {"data:image/s"}
    assert "default-src 'none'" in text and "<script" not in text
    assert "3.90 times" not in text, "over the slower of the two baselines"
    assert "2.98 times as fast (2.90 to 3.10, 99 %) as with the careful plan" in in_short(record)[0]
    for change in ("nothing", record["change"]):
        bad = record | {"change": change, "quarantined": {"low/a<b>.wav": "it is no audio"}}
        assert "left out: 1" in in_short(bad)[-1]
    assert "Nothing that was tried" in in_short(record | {"change": "nothing"})[0]
    assert "a&lt;b&gt;.wav</td><td>it is no audio" in write_report(bad, tmp_path / "report.html").read_text()


def hostile(record):
    """Return the record with a script in every text that a file's name, an error or another machine may bring."""
    record["workload"]["name"] = record["hardware"]["cpu"] = record["change"] = HOSTILE
    record["quarantined"] = {HOSTILE: HOSTILE}
    for row in record["optimizations"]:
        row |= {"why": HOSTILE, "change": HOSTILE, "optimization": HOSTILE}
    record["fallbacks"] = [{"plan": "final", "field": "cache", "asked": HOSTILE, "got": HOSTILE, "why": HOSTILE}]
    return record


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_a_report_full_of_hostile_names_runs_nothing_in_a_browser(record, browser, tmp_path, scheme, width):
    report = write_report(hostile(record), tmp_path / "report.html")
    said, asked, page = [], [], browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    assert page.title().startswith("<script>") and page.title().endswith("times as fast")
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(drawn) >= 2 and min(drawn) > 300
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 25, 29)"}[scheme]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "as good: accuracy changed by +0.0010, at least -0.0120; margin 0.03"),
        ({"decision": "not decided", "seeds_needed": 11}, "cannot show it; about 11 would"),
        (FEW_ITEMS, "80 test items cannot show 0.03; about 880 would"),
        ({"decision": "not tested", "budget_s": 720.0}, "not tested"),
    ],
)
def test_quality_is_one_sentence(change, words):
    assert words in quality_in_words(QUALITY | change)


def test_payback_is_one_sentence_in_the_reader_s_terms():
    first, then = payback_in_words(PAYBACK).split(", with ")
    assert first == "Your 30 epochs: from 2.00 h to 30.0 min"
    assert then == "60.0 s to build the cache and 30.0 s to compile; that pays back after 2.08 min."
    assert "does not pay back" in payback_in_words(PAYBACK | {"pays_back_after_s": None})
    assert payback_in_words(PAYBACK | {"prepare_s": {"cache": 0.0, "compile": 0.0}}) == f"{first}."
