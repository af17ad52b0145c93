"""Each script in benchmarks/ runs and prints a line per figure. What it measures is no test."""

import re

import pytest
from processes import ROOT, python

from speedkit.files import read_json

FOLDER = ROOT / "benchmarks"
NO_LIMITS = ("common", "notebook_hang", "peers", "planted", "scripts")
SCRIPTS = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem not in NO_LIMITS]


def quickly(script, *options):
    return python(FOLDER / f"{script}.py", "--quick", *options)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_prints_each_figure_with_limit_and_verdict(script):
    done = quickly(script)
    verdicts = re.findall(r"^.+ \(\S+ to \S+\), limit .+: (met|missed)$", done.stdout, re.MULTILINE)
    assert verdicts and done.returncode == ("missed" in verdicts), done.stderr[-2000:]


@pytest.mark.slow
def test_peers_print_what_their_record_holds(tmp_path):
    done = quickly("peers", "--out", tmp_path / "peers.json")
    assert done.returncode == 0, done.stderr[-2000:]
    printed = re.findall(r"^(.+): \S+x \(\S+ to \S+\) as fast as .+$", done.stdout, re.MULTILINE)
    record = read_json(tmp_path / "peers.json")
    assert [row["name"] for row in record["measurements"]] == printed
    assert {"read: speedkit's cache", "step of 64 samples: speedkit"} <= {*printed}
    assert {"commit", "machine"} <= {*record}


@pytest.mark.slow
def test_planted_prints_what_is_named_first():
    done = python(FOLDER / "planted.py", "float64", "evaluation without no_grad")
    lines = [line for line in done.stdout.splitlines() if line.startswith("PyTorch")]
    assert ["named first: " in line for line in lines] == [True, True], done.stdout + done.stderr[-2000:]
    assert done.stdout.count("not planted: ") == 2
