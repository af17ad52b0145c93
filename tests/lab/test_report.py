"""The report of a tuning: what it says, and that a browser loads and runs nothing of what a record may hold."""

import html
import re

import pytest

from speedkit.lab.report import in_short, left_out, write_report
from speedkit.measure.words import duration, outcome, ratio_text, result_text, step_in_words
from speedkit.plan import Plan

HOSTILE = "<script>document.title = 'run'</script><img src=https://example.org/x onerror=document.title='run'>"
FASTER = {"decision": "faster"}
MORE = {"mean_change": 0.01, "lower": -0.05}


@pytest.fixture
def record(tuning):
    """Of a tuning whose headline is over the careful plan."""
    careful = FASTER | {"ratio": 2.98, "low": 2.9, "high": 3.1}
    quiet = tuning | {"busy": []}  # the published one names what ran beside it
    return quiet | {"speedup": FASTER | {"ratio": 3.9, "low": 3.8, "high": 4.0}, "speedup_careful": careful}


def page_of(record, tmp_path, **options):
    return html.unescape(write_report(record, tmp_path / "report.html", **options).read_text())


def test_the_report_says_what_to_switch_on_and_what_it_gives(record, tmp_path):
    text = write_report(record, tmp_path / "report.html").read_text()
    order = ["audio: A training of 192 steps takes", "2.98 times as fast (2.90", "careful plan", "<code>cache</code>"]
    order += ["plan.yaml", "class Kept(", "Lightning", "decoder"]
    assert re.search(".*".join(map(re.escape, order)), text, re.DOTALL)
    assert set(re.findall(r'src="([^",]{12})', text)) == {"data:image/s"}
    assert "default-src 'none'" in text and "<script" not in text
    assert "3.90 times" not in text, "over the slower of the two baselines"
    for change, place, words in (("nothing", 0, "Nothing that was tried"), (record["change"], 2, "2.98 times as fast")):
        bad = record | {"change": change, "quarantined": {"low/a<b>.wav": "it is no audio"}}
        bad["optimizations"] = [row for row in record["optimizations"] if row["why"] != "undecided"]
        short = in_short(bad)
        assert words in short[place] and "left out: 1" in short[-1]
    assert "a&lt;b&gt;.wav</td><td>it is no audio" in write_report(bad, tmp_path / "report.html").read_text()


NOISE = {"ratio": 1.87, "low": 0.02, "high": 311.21, "decision": "undecided"}
LOST = {"ratio": 0.64, "low": 0.55, "high": 0.73, "decision": "slower"}
WON = FASTER | {"ratio": 3.98, "low": 3.9, "high": 4.0}
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0, "decision": "not worth it"}


@pytest.mark.parametrize(
    ("changes", "first", "more"),
    [
        ({"speedup": NOISE, "speedup_careful": NOISE}, "Nothing was decided.", "--budget"),
        (
            {"speedup": NOISE, "speedup_careful": NOISE, "busy": ["make", "ffmpeg"]},
            "Nothing was decided: the machine was busy (make, ffmpeg).",
            "when it is idle",
        ),
        ({"speedup": WON | {"decision": "undecided"}, "speedup_careful": NOISE}, "Nothing was decided.", "comparisons"),
        ({"speedup": WON, "speedup_careful": NOISE}, "A training", "3.98 times as fast (3.90 to 4.00, 99 %)"),
        ({"speedup": WON, "speedup_careful": NOISE}, "A training", "careful plan nothing was decided."),
        ({"speedup": LOST}, "A training", "0.64 times as fast (0.55 to 0.73, 99 %) as with plain PyTorch: slower."),
        ({"speedup": WON | {"decision": "not worth it"}}, "A training", "as with plain PyTorch: not worth it."),
        ({"speedup": WON, "speedup_careful": ITSELF}, "A training", "3.98 times"),
    ],
    ids=range(8),
)
def test_what_is_decided_leads_and_what_is_not_is_no_result(record, tmp_path, changes, first, more):
    careful = FASTER | {"ratio": 4.5, "low": 4.4, "high": 4.6}
    told = record | {"speedup_careful": careful} | changes
    short = in_short(told)
    assert short[0].startswith(first) and more in " ".join(short)
    assert "1.87" not in " ".join(short) and "311.21" not in " ".join(short)
    assert f"<h1>audio: {short[0].rstrip('.')}" in page_of(told, tmp_path) or first == "A training"


@pytest.mark.parametrize(
    ("why", "first"),
    [
        (["undecided", "undecided"], "Nothing was decided."),
        (["slower", "undecided"], "Nothing was shown to be faster. Undecided: precision=bf16."),
        (["slower", "not worth it"], "Nothing that was tried is worth switching on"),
    ],
    ids=["none", "some", "all"],
)
def test_where_nothing_was_kept_plain_pytorch_is_not_said_to_be_the_fastest(record, tmp_path, why, first):
    rows = [row | {"kept": False, "why": why} for row, why in zip(record["optimizations"], why, strict=False)]
    told = record | {"change": "nothing", "optimizations": rows, "speedup": ITSELF, "plan": vars(Plan()), "dropped": []}
    assert in_short(told)[0].startswith(first)
    text = page_of(told, tmp_path)
    assert "fastest" not in text and "Nothing: plain PyTorch stays." in text


def test_whole_trainings_come_first_by_the_recipe_and_by_the_horizon(record):
    record["payback"] |= {"baseline_s": 4000.0, "prepare_s": {"cache": 4.0, "compile": 40.0}}
    record["step_s"] |= {"baseline": 0.2, "final": 0.05}
    short = in_short(record)
    included = "in plain PyTorch, 4.00 s to build the cache and 40.0 s to compile included"
    assert short[0] == f"A training of 192 steps takes 53.6 s instead of 38.4 s {included}: 0.72 times as fast."
    assert short[1] == f"A training of 20,000 steps takes 17.4 min instead of 66.7 min {included}: 3.83 times as fast."
    assert "epochs" not in " ".join(short)


def test_what_pays_later_says_from_which_step_on(record, tmp_path):
    row = next(row for row in record["optimizations"] if row["change"] == "compile=default")
    row |= {
        "ratio": 1.3,
        "low": 1.2,
        "high": 1.4,
        "step_s_before": 0.05,
        "pays_from_step": 1900,
        "why": "faster, but pays from 1900 steps on",
    }
    sentence = "pays from 1,900 steps on; this recipe has 192, --horizon says yours"
    assert f"compile=default {sentence}." in in_short(record)
    assert f"faster; {sentence}</td>" in page_of(record, tmp_path)
    lost = record | {"optimizations": [row | {"why": "losses differ by 0.3, at most 0.1 allowed"}]}
    assert "pays from" not in page_of(lost, tmp_path) and left_out(lost)[0]["why"].startswith("losses differ")
    row["kept"] = True
    assert "compile=default pays from 1,900 steps on." in in_short(record)


def test_no_optimization_is_left_out_twice_nor_a_field_that_is_in_the_plan(record):
    compiled = {"compile": "default"}
    change = {"change": "compile=default", "fields": compiled}
    joint = {"change": "precision=fp16, compile=default", "fields": {"precision": "fp16"} | compiled}
    row = {"optimization": "compile", "kept": False, "again": False, "why": "undecided"}
    record["plan"] |= compiled
    record["optimizations"] = [
        row | change | {"ratio": 0.9},
        row | joint | {"ratio": 0.99, "optimization": "precision"},
        row | joint | {"ratio": 0.98, "optimization": "precision", "again": True, "why": "not worth it"},
        row | {"optimization": "threads", "change": "threads=1", "fields": {"threads": 1}, "ratio": None, "why": "no"},
    ]
    record["dropped"] = []
    rows = [(row["optimization"], row["change"], row["why"]) for row in left_out(record)]
    assert rows == [("precision", "precision=fp16", "not worth it"), ("threads", "threads=1", "no")]
    record["optimizations"][3]["kept"] = True
    record["stalls"] = [
        {"optimization": "threads", "change": "threads=1", "kept": False, "ratio": 0.9, "why": "dropped"}
    ]
    assert left_out(record)[1]["why"] == "dropped"


def test_an_interval_without_bounds_is_told_in_words():
    row = {"ratio": 7.338, "low": 0.00001, "high": 8385397.654, "decision": "undecided"}
    told = ratio_text(row), result_text(row), outcome(row)
    assert all("not settled" in text and "7.3" not in text and "8385397" not in text for text in told)
    assert result_text(row | {"low": 0.9, "high": 9.0}) == "undecided (0.90 to 9.00)"
    slower = {"ratio": 0.11, "low": 0.05, "high": 0.24, "decision": "slower"}
    noisy = {"speedup": WON, "speedup_careful": WON, "speedup_again": row, "step_s": {"baseline": 1.0, "careful": 2.0}}
    assert "nothing was decided" in step_in_words(noisy)[-1]
    assert outcome(slower) == "0.11 times as fast (0.05 to 0.24), slower"


def test_the_page_says_why_the_careful_plan_lost(record, tmp_path):
    text = page_of(record, tmp_path).partition("Why not the careful plan")[2]
    [*_, fused] = [row for row in record["optimizations"] if "fused_optimizer" in row["fields"]]
    for words in (
        duration(record["step_s"]["careful"]),
        "precision=tf32</code>",
        "compute capability 8.0",
        "<code>workers=2, persistent_workers=True</code>",
        ratio_text(fused),
    ):
        assert text.count(words) == 1, words


def test_the_commands_are_those_that_were_typed(record, tmp_path):
    options = {"data_dir": "/my clips", "drop_last": False, "epochs": "3", "device": "auto"}
    words = ["tune", "models:lm", "--data-dir", "my clips", "--budget", "5m"]
    text = page_of(record, tmp_path, command=words, workload="models:lm", options=options)
    assert "<code>speedkit tune models:lm --data-dir 'my clips' --budget 5m</code>" in text
    assert "speedkit train models:lm --data-dir '/my clips' --no-drop-last --epochs 3 --plan plan.yaml</code>" in text


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
    assert page.title().startswith("<script>") and "A training of 192 steps" in page.title()
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
