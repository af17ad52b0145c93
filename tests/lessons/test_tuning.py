"""What the lessons of a tuning say of its record."""

from speedkit.lessons.tuning import kept_changes, most_saved


def row(change, ratio, **others):
    interval = {"low": 0.9 * ratio, "high": 1.1 * ratio} if ratio else {"low": None, "high": None}
    return {"change": change, "ratio": ratio, "kept": True} | interval | others


def record(*rows):
    return {"step_s": {"baseline": 0.1}, "optimizations": rows}


def test_a_change_that_was_measured_again_counts_once_by_its_last_measurement():
    [kept] = kept_changes(record(row("cache", 1.1), row("cache", 1.25), row("threads", 0.8, kept=False)))
    assert kept["from_ms"] == 100.0 and kept["to_ms"] == 80.0


def test_what_took_most_off_a_step_need_not_have_the_highest_ratio():
    told = most_saved(record(row("cache", 2.0), row("precision", 2.1), row("channels_last", 4.0)))
    assert told.startswith("cache took most off a step: 100 to 50 ms. channels_last then took 23.8 to 5.95 ms;")
    assert "4.00 against 2.00)" in told
    assert "2.10 against 2.00, intervals that meet" in most_saved(record(row("cache", 2.0), row("precision", 2.1)))
    assert most_saved(record(row("cache", 2.0), row("precision", 1.5))).endswith("step: 100 to 50 ms.")
    assert most_saved(record(row("cache", None, kept=False))) == "nothing took anything off a step."
