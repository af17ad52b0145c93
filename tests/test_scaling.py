"""Scaling on paper: known answers and limits; and measured with two ranks."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import points

from speedkit.errors import UsageError
from speedkit.measure.scaling import Network, Step, exposed_s, fit_ring, measure, predict, ring_s, step_from, transfer_s
from speedkit.plan import Plan
from speedkit.train.loop import begin, close, steps

STEP = Step(forward_s=1.0, backward_s=2.0, other_s=0.5, gradient_bytes=4e9)
SLOW = Network(bytes_per_s=1e9, latency_s=0.0)
MACHINES = Network(bytes_per_s=1e9, latency_s=0.01, per_machine=4, across_bytes_per_s=0.5e9, across_latency_s=0.1)
INFINITE = Network(math.inf, 0.0)
COUNTS = [1, 2, 3, 4, 8, 16, 64, 256, 1024]
WAYS = [(strategy, scaling) for strategy in ("ddp", "fsdp") for scaling in ("weak", "strong")]


def simulated_exposed_s(piece_s, pieces, compute_s):
    """Let pieces become ready one after the other and send each when it is and the link is free."""
    free_s = 0.0
    for piece in range(1, pieces + 1):
        free_s = max(free_s, piece * compute_s / pieces) + piece_s
    return free_s - compute_s


# ---- rings ----


def test_ring_of_four_moves_three_quarters_of_the_bytes_in_three_messages():
    assert ring_s(4, 8e9, 2e9, 0.1) == pytest.approx(0.75 * 4 + 0.3)


def test_all_reduce_is_two_rings():
    # 2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency, for N = 2: the bytes once, and two messages
    assert 2 * transfer_s(2, 6e9, Network(2e9, 0.1)) == pytest.approx(3.0 + 0.2)


def test_across_machines_come_a_ring_within_and_one_across():
    # 16 ranks in 4 machines: 3/4 of the bytes within at 1 GB/s, then 3/4 across at 0.5 GB/s, three messages of each
    assert transfer_s(16, 4e9, MACHINES) == pytest.approx((3.0 + 0.03) + (6.0 + 0.3))
    assert transfer_s(4, 4e9, MACHINES) == pytest.approx(3.0 + 0.03)  # one machine: nothing goes across
    assert transfer_s(13, 4e9, MACHINES) == transfer_s(16, 4e9, MACHINES)  # what is not full counts as full


def test_one_rank_sends_nothing():
    assert transfer_s(1, 4e9, MACHINES) == 0


# ---- overlap ----


def test_all_but_the_last_piece_hide_behind_a_long_computation():
    assert exposed_s(0.25, 4, 4.0) == pytest.approx(0.25)


def test_a_slow_link_starts_after_the_first_piece_and_never_rests():
    assert exposed_s(3.0, 4, 4.0) == pytest.approx(1.0 + 4 * 3.0 - 4.0)


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize("piece_s", [0.0, 0.01, 0.1, 0.2, 0.5, 3.0])
def test_the_formula_is_what_a_simulation_finds(piece_s, pieces):
    assert exposed_s(piece_s, pieces, 2.0) == pytest.approx(simulated_exposed_s(piece_s, pieces, 2.0), abs=1e-12)


# ---- steps ----


def test_one_piece_cannot_overlap():
    # 4 GB over a ring of 2 at 1 GB/s: all bytes, 4 s, after 3.5 s of computing
    row = predict(STEP, SLOW, 2, piece_bytes=math.inf)
    assert row["step_s"] == pytest.approx(3.5 + 4.0)
    assert row["speedup"] == pytest.approx(2 * 3.5 / 7.5) and row["efficiency"] == pytest.approx(3.5 / 7.5)


def test_pieces_hide_behind_the_backward_pass():
    # 4 pieces of 1 s each: the first is ready after 0.5 s of 2, the last ends at 4.5
    row = predict(STEP, SLOW, 2, piece_bytes=1e9)
    assert row["communication_s"] == pytest.approx(4.0) and row["exposed_s"] == pytest.approx(2.5)
    assert predict(STEP, SLOW, 2, piece_bytes=1e9, overlap=False)["exposed_s"] == pytest.approx(4.0)


def test_fsdp_moves_half_as_much_again():
    ddp, fsdp = (predict(STEP, SLOW, 8, strategy=strategy, overlap=False) for strategy in ("ddp", "fsdp"))
    assert fsdp["communication_s"] == pytest.approx(1.5 * ddp["communication_s"])
    # one piece: half a ring-trip of 4 GB is 2 s, once in the forward and twice in the backward pass
    assert predict(STEP, SLOW, 2, strategy="fsdp", piece_bytes=math.inf)["exposed_s"] == pytest.approx(6.0)


def test_strong_scaling_divides_the_passes_and_nothing_else():
    row = predict(STEP, INFINITE, 4, scaling="strong")
    assert row["step_s"] == pytest.approx(0.75 + 0.5)
    assert row["speedup"] == pytest.approx(3.5 / 1.25) and row["efficiency"] == pytest.approx(3.5 / 1.25 / 4)


@pytest.mark.parametrize("strategy,scaling", WAYS)
def test_one_gpu_takes_exactly_its_own_time(strategy, scaling):
    row = predict(STEP, MACHINES, 1, strategy=strategy, scaling=scaling)
    assert row["step_s"] == row["compute_s"] == 3.5
    assert row["communication_s"] == row["exposed_s"] == 0 and row["efficiency"] == row["speedup"] == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", COUNTS)
def test_without_a_limit_of_the_link_efficiency_is_one(strategy, count):
    row = predict(STEP, INFINITE, count, strategy=strategy)
    assert row["efficiency"] == 1 and row["speedup"] == count


@pytest.mark.parametrize("strategy,scaling", WAYS)
@pytest.mark.parametrize("network", [SLOW, MACHINES], ids=["one", "many"])
def test_efficiency_falls_with_ranks_and_rises_with_bandwidth(network, strategy, scaling):
    def efficiencies(network):
        return [predict(STEP, network, n, strategy=strategy, scaling=scaling)["efficiency"] for n in range(1, 130)]

    found = efficiencies(network)
    assert all(later <= earlier for earlier, later in itertools.pairwise(found)) and found[-1] < found[0]
    better = efficiencies(dataclasses.replace(network, bytes_per_s=10 * network.bytes_per_s))
    assert all(more > less for more, less in zip(better[1:], found[1:], strict=True))


# ---- what was measured ----


def test_fit_finds_the_bandwidth_and_latency_that_made_the_times():
    samples = [{"bytes": size, "seconds": [2 * ring_s(4, size, 3e9, 5e-5)] * 3} for size in (4096, 2**18, 2**24)]
    assert fit_ring(4, samples) == pytest.approx((3e9, 5e-5))


def test_fit_believes_no_negative_latency_and_no_outlier():
    samples = [{"bytes": size, "seconds": [size / 1e9, size / 1e9 - 1e-7, 50.0]} for size in (4096, 2**18, 2**24)]
    bytes_per_s, latency_s = fit_ring(2, samples)
    assert latency_s >= 0 and bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_step_is_read_from_raw_seconds():
    found = {
        "ranks": 2,
        "steps_per_window": 3,
        "gradient_bytes": 80,
        "measurements": [{"seconds_a": [6.0, 6.6, 5.0]}],
        "passes": {"forward_s": [0.2, 0.25, 0.9], "both_s": [0.75, 0.75, 0.1]},
    }
    assert step_from(found) == Step(0.25, 0.5, pytest.approx(0.25), 80)


# ---- measured with two ranks ----

WIDE = """
from tiny import points

def workload():
    return points(train=64, hidden=512, schedule="constant")
"""


def torchrun(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess:
    """Run `python -m speedkit.measure.scaling` with `ranks` ranks, one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "SPEEDKIT_CACHE_DIR": str(folder / "cache")}
    command += ["-m", "speedkit.measure.scaling", *arguments]
    environment = os.environ | environment
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
def test_two_ranks_measure_together_and_write_raw_seconds(tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    options = {"batch-size": "8", "pairs": "4", "window-s": "0.01", "device": "cpu", "out": "found.json"}
    done = torchrun(tmp_path, "wide:workload", *(f"--{name}={value}" for name, value in options.items()))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["backend"], found["threads"], found["batch_size"]) == (2, "gloo", 1, 8)
    both, apart = found["measurements"]
    assert (both["a"], both["b"], apart["b"]) == ("one", "all", "all, nothing shared")
    for row in (both, apart):
        assert len(row["seconds_a"]) == len(row["seconds_b"]) == 4 and min(row["seconds_a"] + row["seconds_b"]) > 0
        assert row["low"] <= row["ratio"] <= row["high"]
    assert found["gradient_bytes"] == 4 * (8 * 512 + 512 + 512 * 2 + 2)
    assert all(value > 0 for value in (*fit_ring(2, found["all_reduce"]), *found["passes"]["forward_s"]))
    assert not list(tmp_path.glob(".found.json*"))
    # The losses are those of one process with the batches of both ranks.
    workload = points(train=64, hidden=512, schedule="constant", batch_size=16)
    one = begin(workload, plan=Plan(fused_optimizer=True, drop_last=True), device="cpu", endless=True)
    expected = [float(one.last_loss) for _ in itertools.islice(steps(one), 4)]
    close(one)
    assert found["losses"] == pytest.approx(expected, rel=1e-5)


def test_a_step_that_takes_more_items_than_there_are_is_refused():
    with pytest.raises(UsageError, match="128 items a step of 96"):
        measure(points(), 64, Plan(ranks=2))


def test_without_torchrun_it_says_how_to_start_it(tmp_path):
    command = [sys.executable, "-m", "speedkit.measure.scaling", "image", "--out", str(tmp_path / "found.json")]
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "start it under torchrun" in done.stderr
    assert not (tmp_path / "found.json").exists() and "Traceback" not in done.stderr
