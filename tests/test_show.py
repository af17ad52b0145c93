"""Figures from records, and the report. The records here are made up: of the shape that a climb leaves, for input."""

import base64
import hashlib
import itertools

import pytest
from matplotlib.figure import Figure

from speedkit.clock import duration
from speedkit.measure.trace import CAUSES
from speedkit.show import figures

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
    return {"device": "cpu", "window_s": 10 * step_s, "steps": 10, "step_s": step_s, "rows": rows}


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
    assert duration(value) == text


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
