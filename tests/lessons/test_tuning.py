"""What the lessons of a tuning say of its record."""

from speedkit.lessons.tuning import largest


def test_a_change_that_was_measured_again_counts_once_by_its_last_measurement():
    first = {"change": "cache=ram", "ratio": 1.1, "low": 0.9, "high": 1.3}
    again = first | {"ratio": 1.2, "low": 1.1}
    assert largest([first, again]) == "the highest ratio is that of cache=ram, 1.20."
    assert "meets that of threads=1" in largest([first, again, first | {"change": "threads=1"}])
    assert largest([first | {"ratio": None}]) == "none was measured."
