"""What lessons show of a GPU: every line has its typical error, and nothing of it counts as measured."""

import pytest

from speedkit.dry.predict import ERRORS
from speedkit.lab.record import NotebookRun
from speedkit.lessons import on_a_gpu


@pytest.fixture
def run():
    return NotebookRun("23_compile", {"device": "cpu"})


def test_each_line_has_its_typical_error_and_nothing_is_a_measurement(run):
    table = on_a_gpu.table(run, "text", "baseline", "16 bits", "fast")
    assert list(zip(table["GPU"], table["plan"], strict=True)) == [
        ("H100", "baseline"),
        ("H100", "16 bits"),
        ("H100", "fast"),
        ("T4", "baseline"),
        ("T4", "16 bits"),  # where nothing was compiled
    ]
    assert {*table["typical error"]} == {f"{ERRORS['eager']}x", f"{ERRORS['compiled']}x"}
    seconds = on_a_gpu.counts("steps", "H100")["text"]
    gain = seconds["baseline"]["seconds"] / seconds["fast"]["seconds"]
    assert table["predicted gain"][2] == f"{gain:.2g} (error {ERRORS['gain']}x)"
    on_a_gpu.parts(run, "text", "baseline", "fast", of="seconds_by_kind")
    on_a_gpu.parts(run, "text", "baseline", "fast", of="memory")
    on_a_gpu.on_each(run, "layouts")
    assert not run.record["measurements"] and len(run.record["tables"]) == 4
    assert all("counted" in name or "predicted" in name for name in run.record["tables"])


def test_a_launch_bound_step_is_not_predicted_and_nothing_gains_over_it():
    step = {"seconds_by_kind": {"products": 0.001}, "typical_error": 1.36, "seconds": 0.001, "number_format": "bf16"}
    step |= {"launches": 10, "waits": 0, "memory": {"peak": 5e6}}
    bound = step | {"launches": 1000, "seconds": None}
    assert on_a_gpu.told(bound, step)["predicted step, ms"] == "launch-bound; kernels 0.735 to 1.36"
    assert on_a_gpu.told(step, bound)["predicted gain"] == on_a_gpu.told(bound, step)["predicted gain"] == ""
    assert on_a_gpu.told(step | {"seconds": 0.0009}, step)["predicted gain"] == "too close to call"


@pytest.mark.parametrize("gpu", on_a_gpu.GPUS)
def test_the_order_of_a_step_is_drawn_as_it_was_counted(gpu):
    events = [event for plan in on_a_gpu.counts("orders", gpu).values() for event in plan]
    figure = on_a_gpu.order(gpu)
    assert len(figure.axes[0].collections) == sum(1 if what == "kernels" else number for what, _, number in events)
    assert {what for what, _, _ in events} == {"copy", "wait", "kernels"}
