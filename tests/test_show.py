"""Figures from records, and the report. The records here are made up: of the shape that a climb leaves, for input."""

import base64
import hashlib
import itertools
import os
import shutil
from html.parser import HTMLParser

import nbformat
import pytest
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from speedkit.errors import UsageError
from speedkit.measure.ledger import CAUSES
from speedkit.measure.record import RECORD_MIME
from speedkit.predict import seconds
from speedkit.show import figures
from speedkit.show.report import in_short, payback_in_words, report

HARDWARE = {"device": "cpu", "gpu": None, "cpu": "Intel(R) Xeon(R) Processor", "cores": 2}
GPU = {"device": "cuda", "gpu": "NVIDIA H200", "cpu": "AMD EPYC", "cores": 16}


def measurement(name, ratio, spread=0.03, floor: float | None = 1.02):
    return {
        "name": name,
        "a": "fp32",
        "b": name,
        "seconds_a": [1.0, 1.1],
        "seconds_b": [0.9, 1.0],
        "ratio": ratio,
        "low": ratio * (1 - spread),
        "high": ratio * (1 + spread),
        "noise_floor": floor,
    }


def rung(name, change, before_s, ratio, why=""):
    measured = ratio is not None
    return {
        "rung": name,
        "change": change,
        "predicted_low": 1.2,
        "predicted_high": 1.9,
        "ratio": ratio,
        "kept": not why,
        "low": ratio * 0.97 if measured else None,
        "high": ratio * 1.03 if measured else None,
        "noise_floor": 1.015 if measured else None,
        "parity": "losses bit-equal" if measured else None,
        "why": why or "faster beyond the noise, and learns the same",
        "step_s_before": before_s if measured else None,
        "step_s_after": before_s / ratio if measured else None,
    }


def curves(total_s, offset_s):
    def value(epoch, seed):
        return 0.9 - 0.7 * 0.45 ** (epoch + 1 + 0.1 * seed)

    return [
        {"seed": seed, "points": [[offset_s + total_s * (epoch + 1) / 6, value(epoch, seed)] for epoch in range(6)]}
        for seed in range(3)
    ]


PAYBACK = {
    "epochs": 30,
    "baseline_s": 7200.0,
    "final_s": 1800.0,
    "prepare_s": {"cache": 60.0, "compile": 30.0},
    "saved_s": 5400.0,
    "pays_back_after_s": 125.0,
}


def ledger(step_s, shares, unexplained):
    rows = [
        {"cause": cause, "seconds": 10 * step_s * share, "share": share, "ceiling_speedup": 1 / (1 - share)}
        for cause, share in (shares | {"unexplained": unexplained}).items()
    ]
    return {"device": "cpu", "window_s": 10 * step_s, "steps": 10, "step_s": step_s, "slow_down": 1.01, "rows": rows}


def roof(dtype, step_s, ceiling):
    reached = 4e9 / step_s
    return {
        "flops_per_step": 4e9,
        "bytes_per_step": 5e8,
        "dtype": dtype,
        "mfu": reached / ceiling,
        "achieved_flops_per_s": reached,
        "ceiling_flops_per_s": ceiling,
        "bandwidth_ceiling": 1e10,
    }


def climb_record():
    return {
        "notebook": "90_climb",
        "profile": "cpu",
        "parameters": {"workload": "audio"},
        "hardware": HARDWARE,
        "workload": {"name": "audio", "train": 800, "test": 400},
        "versions": {"torch": "2.11.0"},
        "measurements": [],
        "rungs": [
            rung("workers", "workers=2, persistent_workers=True", 0.42, 1.31),
            rung("cache", "cache=ram, cache_dtype=float16, workers=0", 0.32, 1.86),
            rung("micro_batch", "micro_batch=16", 0.171, 0.93, "low end 0.902 is not above the noise floor 1.015"),
            rung("precision", "precision=bf16", 0.172, 1.61),
            rung("host_syncs", "fused_optimizer=True", 0.172, None, "not tried: the time budget is needed"),
            rung("compile", "compile=default", 0.107, 1.35, "losses differ by 0.03, beyond the 0.01 of another seed"),
        ],
        "speedup": {"ratio": 3.92, "low": 3.81, "high": 4.03},
        "speedup_careful": {"ratio": 2.98, "low": 2.9, "high": 3.06},
        "step_s": {"baseline": 0.42, "careful": 0.319, "final": 0.107},
        "quality": {
            "metric": "accuracy",
            "higher_is_better": True,
            "margin": 0.03,
            "passed": True,
            "mean_change": 0.001,
            "lower": -0.012,
        },
        "change": "cache=ram",
        "payback": PAYBACK,
        "ledgers": {
            "baseline": ledger(0.42, {"data wait": 0.6, "forward": 0.15, "backward": 0.247}, 0.003),
            "final": ledger(0.107, {"forward": 0.35, "backward": 0.67}, -0.02),
        },
        "roofline": {"baseline": roof("fp32", 0.42, 1e11), "final": roof("bf16", 0.107, 3e11)},
        "time_to_quality": {
            "target": 0.8,
            "baseline_s": 31.0,
            "final_s": 14.0,
            "ratio": 2.21,
            "curves": {"baseline": curves(84, 0), "final": curves(21, 6)},
        },
    }


def words(figure: Figure) -> str:
    """Return everything that a figure says, labels, legends and notes."""
    texts = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return " | ".join(text for text in texts if text)


def bars(figure: Figure, colour: str) -> int:
    from matplotlib.colors import to_hex

    return sum(to_hex(patch.get_facecolor()).upper() == colour.upper() for patch in figure.axes[0].patches)


# ---- figures ----


def test_waterfall_shows_every_rung_with_its_verdict():
    figure = figures.waterfall(climb_record())
    said = words(figure)
    assert (bars(figure, figures.BLUE), bars(figure, figures.GREY), bars(figure, figures.GREEN)) == (3, 2, 2)
    assert all(row["rung"] in said for row in climb_record()["rungs"])
    assert "3.92× (3.81 to 4.03) over plain PyTorch, 2.98× (2.90 to 3.06) over a careful start" in said
    assert "not tried: the time budget is needed" in said
    assert "Intel Xeon Processor, 2 cores · audio, 800 training items" in said
    assert "time per step, ms" in said


def test_waterfall_of_a_climb_that_kept_nothing():
    record = climb_record()
    record["rungs"] = [rung("workers", "workers=2", 0.42, None, "not tried: the time budget is needed")]
    record["speedup"] = {"ratio": 1.0, "low": 1.0, "high": 1.0}
    record["step_s"] = {"baseline": 0.42, "careful": 0.40, "final": 0.42}
    record["speedup_careful"] = {"ratio": 0.95, "low": 0.93, "high": 0.97}
    assert bars(figures.waterfall(record), figures.BLUE) == 0


def test_time_to_quality_marks_the_target_and_who_reached_it():
    record = climb_record()
    assert "plain PyTorch: target after 31 s" in words(figures.time_to_quality(record))
    record["time_to_quality"] |= {"final_s": None, "ratio": None}
    said = words(figures.time_to_quality(record))
    assert "final plan: target not reached" in said and "accuracy, test set" in said


def test_ratios_puts_recorded_machines_below_this_one_by_name():
    here = {"hardware": HARDWARE, "measurements": [measurement("bf16", 1.6), measurement("itself", 1.005, floor=None)]}
    there = {"hardware": GPU, "measurements": [measurement("bf16", 1.9, 0.01), measurement("fp8", 2.5)]}
    said = words(figures.ratios(here, [there], title="bf16 against fp32"))
    assert "NVIDIA H200" in said and "Intel Xeon Processor, 2 cores" in said and "bf16 against fp32" in said
    assert "1.90× (1.88 to 1.92)" in said
    assert "fp8" not in said, "it was not measured here"
    assert "itself" not in words(figures.ratios(here, names=["bf16"]))
    assert "this machine" in words(figures.ratios(here["measurements"]))


def test_ratios_draws_a_hollow_mark_where_the_noise_was_not_cleared():
    figure = figures.ratios([measurement("clear", 1.6), measurement("unclear", 1.005), measurement("slower", 0.8)])
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True, False]


def segments(figure, row):
    """Return (left, width, colour, hatch) of the bars in one row of a figure."""
    from matplotlib.colors import to_hex

    bars = (patch for patch in figure.axes[0].patches if abs(patch.get_y() + patch.get_height() / 2 - row) < 0.01)
    drawn = (bar for bar in bars if bar.get_width())
    return [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor()).upper(), bar.get_hatch()) for bar in drawn]


def test_ledgers_add_up_to_the_whole_bar_and_show_what_is_unexplained_whatever_its_size():
    figure = figures.ledgers(climb_record()["ledgers"], climb_record())
    whole, overlapping = segments(figure, 0), segments(figure, 1)
    assert [colour for _, _, colour, _ in whole[:-1]] == [
        figures.COLOURS[cause] for cause in ("data wait", "forward", "backward")
    ]
    assert sum(whole[-1][:2]) == pytest.approx(100) and sum(overlapping[-1][:2]) == pytest.approx(100)
    assert whole[-1][3] == overlapping[-1][3] == "////" and overlapping[-1][1] < 0, "causes that overlap are not hidden"
    said = words(figure)
    assert "420 ms per step\nunexplained 0.3 %" in said and "107 ms per step\nunexplained -2.0 %" in said
    assert "60 %" in said and "share of the wall time of a step, %" in said


def test_every_cause_has_a_colour_of_its_own_and_the_smallest_share_a_segment():
    assert list(figures.COLOURS) == list(CAUSES) and len(set(figures.COLOURS.values())) == len(CAUSES)
    shares = dict.fromkeys(CAUSES[:-1], 0.001) | {"idle": 0.988}
    figure = figures.ledgers(
        {"a name of a plan that is much longer than there is room for": ledger(1e-5, shares, 0.001)}
    )
    assert len(segments(figure, 0)) == len(CAUSES)
    assert "10.0 µs per step" in words(figure)


def test_predicted_ranges_lie_behind_what_was_measured():
    record = climb_record()
    figure = figures.predicted(record)
    said = words(figure)
    assert "4 of 5 measured intervals meet what was predicted" in said, "of those that were measured at all"
    assert "1.31× (1.27 to 1.35)\npredicted 1.20 to 1.90" in said and "host_syncs" not in said
    assert "No rung was tried" in words(figures.predicted(record | {"rungs": []}))


def test_roofline_puts_both_plans_under_their_roofs():
    figure = figures.roofline(climb_record())
    said = words(figure)
    assert "plain PyTorch: 9.52 GFLOP/s, 9.5% of fp32" in said and "final plan: 37.4 GFLOP/s, 12.5% of bf16" in said
    assert "fp32: 100 GFLOP/s" in said and "bf16: 300 GFLOP/s" in said
    points = {line.get_color(): line.get_xydata()[0] for line in figure.axes[0].lines if line.get_marker() == "o"}
    assert points[figures.ORANGE] == pytest.approx([8.0, 4 / 0.42])
    nothing = {name: row | {"flops_per_step": 0} for name, row in climb_record()["roofline"].items()}
    assert "No FLOPs were counted" in words(figures.roofline(climb_record() | {"roofline": nothing}))


def test_no_words_of_a_figure_overlap_or_are_cut_off(tmp_path):
    long = climb_record()["rungs"] + [rung("a rung", "field=value, " * 20, 0.4, 1.02, "a long reason " * 20)]
    record = climb_record() | {"rungs": long}
    for figure in (figures.waterfall(record), figures.predicted(record), figures.ledgers(record["ledgers"], record)):
        figures.save(figure, tmp_path / "figure.png")
        whole = figure.bbox
        boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 for box in boxes)
        below = sorted((box for box in boxes if box.x0 > figure.axes[0].bbox.x1), key=lambda box: -box.y0)
        assert all(one.y0 >= other.y1 - 1 for one, other in itertools.pairwise(below))


@pytest.mark.parametrize(
    ("value", "text"),
    [(9000, "2.50 h"), (125, "2.08 min"), (1, "1.00 s"), (0.0421, "42.1 ms"), (1e-5, "10.0 µs"), (59, "59.0 s")],
)
def test_seconds_are_told_in_the_unit_that_reads_best(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_same_record_gives_the_same_bytes_without_a_date(tmp_path, kind):
    hashes = set()
    for name in ("one", "two"):
        path = tmp_path / f"{name}.{kind}"
        figures.save(figures.waterfall(climb_record()), path)
        content = path.read_bytes()
        hashes.add(hashlib.sha256(content).hexdigest())
        assert b"<dc:date>" not in content and len(content) < 250_000
    assert len(hashes) == 1


def test_show_displays_a_small_png_with_the_title_in_words(capsys, monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    figures.show(figures.waterfall(climb_record()))
    data, metadata = shown[0]._repr_png_()
    assert len(base64.b64decode(data)) < 50_000 and "3.92×" in metadata["alt"]


# ---- report ----


class Page(HTMLParser):
    """What a page holds, as a browser would see it."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.fetched, self.text = [], [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name == "src" or (name == "href" and tag != "a")]

    def handle_data(self, data):
        self.text += data


def notebook(path, *outputs, prose="Read [this](12_feature_cache.ipynb) and [that](https://example.org/page)."):
    cells = [
        new_markdown_cell(f"# The <climb>\n\n{prose}\n\n<details><summary>Solution</summary>\n\nSix.\n\n</details>"),
        new_code_cell("print('<script src=1>')", execution_count=1, outputs=[new_output("stream", text="PASS <all>")]),
        new_code_cell("figure", execution_count=2, outputs=list(outputs)),
    ]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def displayed(**data):
    return new_output("display_data", data={kind.replace("_", "/"): value for kind, value in data.items()})


def test_report_stands_alone(tmp_path):
    figure = base64.b64encode(b"a figure").decode()
    source = notebook(tmp_path / "climb.ipynb", displayed(image_png=figure), displayed(text_html="<table></table>"))
    page = Page(report(source, tmp_path / "report.html"))
    assert page.fetched == [f"data:image/png;base64,{figure}"]
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "PASS <all>" in page.text and "print('<script src=1>')" in page.text and "Six." in page.text
    assert page.tags.count("details") == 3, "the code of two cells and one solution are folded"
    html = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in html and '<a href="https://example.org/page">' in html
    assert "12_feature_cache.ipynb" not in html, "that notebook does not lie beside the report"


def test_report_leaves_scripts_and_widgets_out(tmp_path):
    script = new_output("display_data", data={"application/javascript": "load()", "text/plain": "script"})
    widget = new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})
    page = Page(report(notebook(tmp_path / "n.ipynb", script, widget), tmp_path / "r.html"))
    assert "script" not in page.tags and page.fetched == [] and "load()" not in page.text


def test_report_lets_a_browser_load_and_run_nothing(tmp_path):
    foreign = '<img src="https://example.org/a.png"><script>load()</script>'
    html = report(notebook(tmp_path / "n.ipynb", displayed(text_html=foreign)), tmp_path / "r.html").read_text()
    policy, kind = "default-src 'none'; img-src data:; style-src 'unsafe-inline'", "Content-Security-Policy"
    (tag,) = (line for line in html.splitlines() if kind in line)
    assert tag.startswith("<meta ") and policy in tag
    assert html.index(tag) < html.index("<style>") < html.index("</head>") < html.index("https://example.org/a.png")


def climbed(folder, figure=None):
    """Write a notebook with the record of a climb, a wide table and a figure; return its report."""
    wide = "<table><tr>" + "".join(f"<td>a_column_of_a_table_{column}</td>" for column in range(12)) + "</tr></table>"
    shown = new_output("display_data", data={RECORD_MIME: climb_record(), "text/plain": "record"})
    image = [displayed(image_png=base64.b64encode(figure).decode())] if figure else []
    return report(notebook(folder / "n.ipynb", shown, displayed(text_html=wide), *image), folder / "r.html")


def test_report_of_a_climb_says_the_result_first(tmp_path):
    text = Page(climbed(tmp_path)).text
    assert text.index("In short") < text.index("Read this")
    for sentence in in_short(climb_record()):
        assert sentence in text
    assert "In short" not in Page(report(notebook(tmp_path / "m.ipynb"), tmp_path / "m.html")).text


def test_in_short_draws_every_figure_from_the_record():
    record = climb_record()
    said = " ".join(in_short(record))
    assert (
        "3.92 times as fast as plain PyTorch (3.81 to 4.03, 99 %)" in said and "2.98 times as fast as a careful" in said
    )
    assert "as good: accuracy changed by +0.0010, 95 % sure to be above -0.0120; margin 0.03" in said
    assert "J now" not in said
    record["quality"] |= {"passed": False}
    record["energy"] = {"baseline_j": 5000.0, "final_j": 1200.0}
    said = " ".join(in_short(record))
    assert "NOT shown to be as good" in said and "5e+03 J in plain PyTorch, 1.2e+03 J now" in said
    record["quality"] |= {"lower": None}
    assert "fewer than two seeds" in " ".join(in_short(record))
    assert in_short({"measurements": []}) == [], "the record of another notebook"


def test_payback_is_one_sentence_in_the_reader_s_terms():
    assert payback_in_words(PAYBACK) == (
        "Your 30 epochs: from 2.00 h to 30.0 min, with 60.0 s to build the cache and 30.0 s to compile; "
        "that pays back after 2.08 min."
    )
    never = PAYBACK | {"pays_back_after_s": None}
    assert payback_in_words(never).endswith("that does not pay back within so short a training.")
    nothing = PAYBACK | {"prepare_s": {"cache": 0.0, "compile": 0.0}, "pays_back_after_s": 0.0}
    assert payback_in_words(nothing) == "Your 30 epochs: from 2.00 h to 30.0 min."


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_report_in_a_browser(tmp_path, scheme, width):
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        why = "the browser tests need Chromium: make system installs it"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    figures.save(figures.waterfall(climb_record()), tmp_path / "w.png")
    page_path = climbed(tmp_path, (tmp_path / "w.png").read_bytes())
    assert page_path.stat().st_size < 3_000_000
    said, asked = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_path.as_uri())
        seen = page.evaluate("""() => {
            const table = document.querySelector("table"), image = document.querySelector("img");
            return {page: document.documentElement.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
                    ink: getComputedStyle(document.body).color, image: image.getBoundingClientRect().width,
                    drawn: image.naturalWidth, table: table.scrollWidth, box: table.parentElement.clientWidth}}""")
        browser.close()
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [page_path.as_uri()]
    assert seen["page"] <= width, "only tables scroll sideways, not the page"
    assert seen["table"] > seen["box"] or width > 360
    assert 0 < seen["image"] <= min(width, seen["drawn"]) and seen["drawn"] > 360
    light, dark = "rgb(255, 255, 255)", "rgb(22, 25, 29)"
    assert seen["paper"] == (light if scheme == "light" else dark) != seen["ink"]


def test_report_of_what_is_no_notebook(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        report(tmp_path / "missing.ipynb", tmp_path / "report.html")
