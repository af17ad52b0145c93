"""When a step is called steady."""

import torch

from speedkit.measure import warm_up
from speedkit.measure.warm_up import WINDOWS, compilations, run_until_steady


def test_a_recompiling_step_is_counted_and_not_called_steady_too_early(monkeypatch):
    monkeypatch.setattr(warm_up, "WINDOW_S", 0.0)  # each step is a window
    monkeypatch.setattr(warm_up, "TOLERANCE", 1e9)
    torch._dynamo.reset()
    before, calls = compilations(), []
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)

    def step():
        calls.append(1)
        compiled(torch.ones(min(len(calls), 5)))  # five shapes, one per call: each compiles anew

    assert run_until_steady(step, "cpu", max_s=30.0) > 0
    assert len(calls) == 5 + WINDOWS, "none of the windows that agree compiled anything"
    torch._dynamo.reset()
    assert compilations() - before == 5  # a reset must not look like fewer compilations
    torch.compile(lambda x: x + 1 if x.sum() > 0 else x, backend="eager")(torch.ones(1))
    guard, broken = warm_up.failed_guard_and_break()
    assert "size mismatch" in guard and "test_warm_up.py" in broken and "x.sum() > 0" in broken
    monkeypatch.setattr(warm_up, "TOLERANCE", 0.0)
    assert run_until_steady(lambda: None, "cpu", max_s=0.05) > 0, "it gives up"
