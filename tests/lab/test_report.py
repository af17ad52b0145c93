"""The report of a tuning: what it says, and that a browser loads and runs nothing of what a record may hold."""

import re

import pytest

from speedkit.lab.report import in_short, write_report

HOSTILE = "<script>document.title = 'run'</script><img src=https://example.org/x onerror=document.title='run'>"
MORE = {"mean_change": 0.01, "lower": -0.05}


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
    for change, first in (("nothing", "Nothing that was tried"), (record["change"], "2.98 times as fast")):
        bad = record | {"change": change, "quarantined": {"low/a<b>.wav": "it is no audio"}}
        short = in_short(bad)
        assert first in short[0] and "left out: 1" in short[-1]
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
    assert min(page.evaluate("[...document.images].map(image => image.naturalWidth)")) > 0
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize(
    ("part", "change", "word"),
    [
        ("quality", {"decision": "as good"}, "as good"),
        ("quality", {"decision": "not decided", "seeds_needed": 11}, "about 11 would"),
        (
            "quality",
            {"decision": "not decided", "likelihood": MORE, "test_items": 80, "items_needed": 880},
            "about 880 would",
        ),
        ("quality", {"decision": "not tested", "budget_s": 720.0}, "not tested"),
        ("payback", {"pays_back_after_s": 6.05}, "pays back after 6.05 s"),
        ("payback", {"pays_back_after_s": None}, "does not pay back"),
    ],
    ids=range(6),
)
def test_quality_and_payback_are_told_in_short(record, part, change, word):
    assert word in " ".join(in_short(record | {part: record[part] | change}))
