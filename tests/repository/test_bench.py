"""Each script in benchmarks/ runs and prints a line per limit, with its verdict. What it measures is no test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem not in ("common", "notebook_hang")]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_prints_each_figure_with_limit_and_verdict(script):
    command = [sys.executable, FOLDER / f"{script}.py", "--quick"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    verdicts = re.findall(r"^.+ \(\S+ to \S+\), limit .+: (met|missed)$", done.stdout, re.MULTILINE)
    assert verdicts and done.returncode == ("missed" in verdicts), done.stderr[-2000:]
