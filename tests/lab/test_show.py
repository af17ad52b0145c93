"""Figures, drawn from the tuning that is published, and from rows where a figure has to be read off."""

import itertools

import pytest

from speedkit.lab import figures


def measurement(name, ratio, spread=0.03):
    ends = {"low": ratio * (1 - spread), "high": ratio * (1 + spread)}
    return {"name": name, "ratio": ratio, "decision": "faster"} | ends


def words(figure):
    """Return everything that a figure says, labels, legends and notes."""
    texts = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return " | ".join(text for text in texts if text)


def test_waterfall_shows_what_was_tried_and_one_headline_over_the_faster_baseline(tuning):
    tuning["optimizations"][0] |= {"optimization": "left alone", "ratio": None, "kept": False}
    tried = [row for row in tuning["optimizations"] if row["ratio"] is not None]
    for faster, other, name in (("speedup", "speedup_careful", "plain"), ("speedup_careful", "speedup", "the careful")):
        tuning |= {faster: measurement("", 2.5), other: measurement("", 3.5)}
        figure = figures.waterfall(tuning)
        assert f"{figures.ratio_text(tuning[faster])} over {name}" in words(figure) and "3.50×" not in words(figure)
    assert all(row["optimization"] in words(figure) for row in tried) and "left alone" not in words(figure)


def test_breakdowns_add_up_to_the_whole_bar_and_show_what_is_unexplained_whatever_its_size():
    def breakdown(step_s, shares):
        return {"step_s": step_s, "rows": [{"cause": cause, "share": share} for cause, share in shares.items()]}

    whole = breakdown(0.42, {"data wait": 0.6, "forward": 0.397, "unexplained": 0.003})
    figure = figures.breakdowns(
        {"whole": whole, "overlapping": breakdown(0.107, {"forward": 1.02, "unexplained": -0.02})}
    )
    for row in (0, 1):
        bars = [bar for bar in figure.axes[0].patches if abs(bar.get_y() + bar.get_height() / 2 - row) < 0.01]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(100)
    assert all(text in words(figure) for text in ("420 ms", "unexplained 0.3 %", "unexplained -2.0 %", "60 %"))


def test_no_words_of_a_figure_overlap_or_are_cut_off(tmp_path, tuning):
    tuning["optimizations"][0] |= {"change": "field=value, " * 20, "why": "a long reason " * 20, "kept": False}
    for figure in (figures.waterfall(tuning), figures.breakdowns(tuning["breakdowns"], tuning)):
        figure.savefig(tmp_path / "figure.png")
        boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        beside = sorted((box for box in boxes if box.x0 > figure.axes[0].bbox.x1), key=lambda box: -box.y0)
        assert all(upper.y0 >= lower.y1 - 1 for upper, lower in itertools.pairwise(beside))
