"""What lessons work out of costs, and draw: when a build is back, what a copy takes."""

import types

import pandas
import pytest

from speedkit.lessons import costs, pictures_bits, pictures_costs


def test_a_cache_is_back_when_its_savings_are_its_build_and_never_where_it_may_save_nothing():
    row = types.SimpleNamespace(a="live", step_s=(0.1, 0.05), ratio=2.0, low=1.25, high=5.0)
    saved_s, told = costs.payback(2.0, row, steps=10)
    assert saved_s == pytest.approx([0.8, 0.5, 0.2])
    assert (told["at the earliest"], told["at the latest"]) == ("2.5", "10.0")
    row.low = 0.9
    assert costs.payback(2.0, row, steps=10)[1]["at the latest"] == "never"
    figure = pictures_costs.payback(2.0, {"live": saved_s, "workers": saved_s}, title="back")
    assert len(figure.axes) == 2 and figure.get_suptitle() == "back"


def test_a_copy_is_a_larger_share_of_a_step_in_16_bits_and_hiding_it_gains_that_share():
    rows, shares = costs.copies({"H100": 64e9, "T4": 16e9})
    assert [row["products in"] for row in rows] == ["tf32", "bf16", "fp32", "fp16"]
    assert all(0 < low < high < 0.5 for low, high in shares)
    assert shares[0] < shares[1] and shares[2] < shares[3]
    assert rows[0]["gain"].startswith(f"{1 / (1 - shares[0][0]):.2f}")
    assert len(pictures_costs.copies(rows, shares, title="shares").axes[0].patches) == 2 * len(rows)


def test_each_part_has_its_time_for_one_item():
    assert costs.each_us({"nothing": lambda: None}, 10)["nothing"] < 1e3


def test_dots_curves_and_widths_are_drawn():
    table = pandas.DataFrame({"kind": ["a", "a", "b"], "loss": [1.0, 2.0, 3.0]})
    [axes] = pictures_costs.seeds(table, "kind", ["loss"], title="dots").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert len(pictures_costs.curves({1: 2.0, 2: 3.0}, {1: 2.0, 2: 4.0}, title="two").axes[0].lines) == 2
    rows = [{"rows": count, "width": width, "gain at best": 1.0} for count in (1024, 4096) for width in (512, 8192)]
    assert "FP8" in pictures_costs.widths(rows, title="FP8 pays").get_suptitle()
    assert [row["from 1 to 2"] for row in pictures_bits.formats()] == [128, 8, 4]
