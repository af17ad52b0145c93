"""What lesson 40 starts under torchrun: two ranks measure together, and learn what one would."""

import itertools
import json

import pytest
from processes import ROOT, TESTS, python
from tiny import opened, points

from speedkit.plan import Plan
from speedkit.train.loop import steps

SCRIPT = ("-m", "speedkit.lessons.ranks")
WIDE = {"train": 64, "hidden": 512, "schedule": "constant"}


@pytest.mark.slow
def test_two_ranks_measure_together_and_write_raw_seconds(tmp_path):
    (tmp_path / "wide.py").write_text(f"from tiny import points\n\ndef workload():\n    return points(**{WIDE})\n")
    job = {"workload": "wide:workload", "batch_size": 8, "pairs": 4, "turn_s": 0.01, "device": "cpu", "out": "a.json"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python(*torchrun, *SCRIPT, json.dumps([job]), folder=tmp_path, paths=(tmp_path, ROOT, TESTS))
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["ranks"], result["backend"], result["threads"], result["batch_size"]) == (2, "gloo", 1, 8)
    for row in result["measurements"]:
        assert len(row["seconds_a"]) == len(row["seconds_b"]) == 4 and min(row["seconds_a"] + row["seconds_b"]) > 0
    assert result["gradient_bytes"] == 4 * (8 * 512 + 512 + 512 * 2 + 2)
    assert all(seconds > 0 for row in result["all_reduce"] for seconds in row["seconds"])

    # The losses are those of one process with the batches of both ranks.
    plan, work = Plan(fused_optimizer=True), points(batch_size=16, drop_last=True, **WIDE)
    with opened(work, plan=plan, endless=True) as one:
        expected = [float(one.position.last_loss) for _ in itertools.islice(steps(one), 4)]
    assert result["losses"] == pytest.approx(expected, rel=1e-5)


def test_without_torchrun_it_says_how_to_start_it(tmp_path):
    done = python(*SCRIPT, '[{"workload": "image", "out": "a.json"}]', folder=tmp_path)
    assert done.returncode == 1 and "start it under torchrun" in done.stderr and "Traceback" not in done.stderr
