"""What lesson 40 starts under torchrun: two ranks measure together, and learn what one would."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import points

from speedkit.plan import Plan
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

SCRIPT = ("-m", "speedkit.lessons.ranks")
WIDE = {"train": 64, "hidden": 512, "schedule": "constant"}


def run(folder, *command):
    paths = os.pathsep.join(map(str, (folder, Path(__file__).parent.parent)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    whole = [sys.executable, *command]
    return subprocess.run(whole, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
def test_two_ranks_measure_together_and_write_raw_seconds(tmp_path):
    (tmp_path / "wide.py").write_text(f"from tiny import points\n\ndef workload():\n    return points(**{WIDE})\n")
    job = {"workload": "wide:workload", "batch_size": 8, "pairs": 4, "turn_s": 0.01, "device": "cpu", "out": "a.json"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, *torchrun, *SCRIPT, json.dumps([job]))
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["ranks"], result["backend"], result["threads"], result["batch_size"]) == (2, "gloo", 1, 8)
    for row in result["measurements"]:
        assert len(row["seconds_a"]) == len(row["seconds_b"]) == 4 and min(row["seconds_a"] + row["seconds_b"]) > 0
    assert result["gradient_bytes"] == 4 * (8 * 512 + 512 + 512 * 2 + 2)
    assert all(seconds > 0 for row in result["all_reduce"] for seconds in row["seconds"])

    # The losses are those of one process with the batches of both ranks.
    plan, work = Plan(fused_optimizer=True), points(batch_size=16, drop_last=True, **WIDE)
    with contextlib.closing(setup_run(work, plan=plan, device="cpu", endless=True)) as one:
        expected = [float(one.position.last_loss) for _ in itertools.islice(steps(one), 4)]
    assert result["losses"] == pytest.approx(expected, rel=1e-5)


def test_without_torchrun_it_says_how_to_start_it(tmp_path):
    done = run(tmp_path, *SCRIPT, '[{"workload": "image", "out": "a.json"}]')
    assert done.returncode == 1 and "start it under torchrun" in done.stderr and "Traceback" not in done.stderr
