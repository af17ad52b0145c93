"""The benchmarks run, and each row says what was measured, its limit and the verdict. What they find is no test."""

import pytest

from speedkit.measure import bench

BRIEF = {
    "loop": (2, 2),
    "import": (2,),
    "memory": (2, 2),
    "checkpoint": (1,),
    "aa": (2, 6),
    "planted": (2, 6),
    "panel": (2, 20),
    "watch": (2,),
}
BENCHMARKS = bench.BENCHMARKS


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_gives_rows_with_limit_and_verdict(name):
    for row in BENCHMARKS[name](*BRIEF[name]):
        assert 0 <= row["low"] <= row["measured"] <= row["high"]
        assert row["passed"] == (row["measured"] <= row["limit"])
        assert row["what"] in bench.line(row) and ("passed" in bench.line(row)) == row["passed"]
