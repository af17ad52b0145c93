"""Figures from records, and the report. The records here are made up: of the shape that a climb leaves, for input."""

import base64
import hashlib
from html.parser import HTMLParser

import nbformat
import pytest
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from speedkit.errors import UsageError
from speedkit.show import figures
from speedkit.show.report import report

HARDWARE = {"device": "cpu", "gpu": None, "cpu": "Intel(R) Xeon(R) Processor", "cores": 2}
GPU = {"device": "cuda", "gpu": "NVIDIA H200", "cpu": "AMD EPYC", "cores": 16}


def measurement(name, ratio, spread=0.03, floor: float | None = 1.02):
    return {"name": name, "a": "fp32", "b": name, "seconds_a": [1.0, 1.1], "seconds_b": [0.9, 1.0], "ratio": ratio,
            "low": ratio * (1 - spread), "high": ratio * (1 + spread), "noise_floor": floor}  # fmt: skip


def rung(name, change, before_s, ratio, why=""):
    measured = ratio is not None
    return {
        "rung": name, "change": change, "predicted_low": 1.2, "predicted_high": 1.9, "ratio": ratio, "kept": not why,
        "low": ratio * 0.97 if measured else None, "high": ratio * 1.03 if measured else None,
        "noise_floor": 1.015 if measured else None, "parity": "losses bit-equal" if measured else None,
        "why": why or "faster beyond the noise, and learns the same",
        "step_s_before": before_s if measured else None, "step_s_after": before_s / ratio if measured else None,
    }  # fmt: skip


def curves(total_s, offset_s):
    def value(epoch, seed):
        return 0.9 - 0.7 * 0.45 ** (epoch + 1 + 0.1 * seed)

    return [{"seed": seed, "points": [[offset_s + total_s * (epoch + 1) / 6, value(epoch, seed)] for epoch in range(6)]}
            for seed in range(3)]  # fmt: skip


def climb_record():
    return {
        "notebook": "90_climb", "profile": "cpu", "parameters": {"workload": "audio"}, "hardware": HARDWARE,
        "workload": {"name": "audio", "train": 800, "test": 400}, "versions": {"torch": "2.11.0"}, "measurements": [],
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
        "quality": {"metric": "accuracy", "higher_is_better": True, "margin": 0.03, "passed": True},
        "time_to_quality": {"target": 0.8, "baseline_s": 31.0, "final_s": 14.0, "ratio": 2.21,
                            "curves": {"baseline": curves(84, 0), "final": curves(21, 6)}},
    }  # fmt: skip


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


def test_report_of_what_is_no_notebook(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        report(tmp_path / "missing.ipynb", tmp_path / "report.html")
