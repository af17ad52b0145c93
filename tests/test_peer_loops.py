"""Notebook 92 where no peer is installed."""

import os
import subprocess
import sys

import pytest
from publish import code_cells

from speedkit import files
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.record import read_notebook

HIDDEN = "import sys\nfor name in ('lightning', 'accelerate', 'transformers'):\n    sys.modules[name] = None\n"


@pytest.mark.slow
def test_without_peers_they_are_listed_and_the_rest_is_measured(tmp_path):
    cells = code_cells(read_notebook(notebooks_folder() / "92_peer_loops.ipynb"))
    (tmp_path / "cells.py").write_text(HIDDEN + "\n".join(cell.source for cell in cells) + "\n")
    env = os.environ | {"SPEEDKIT_PROFILE": "smoke", "SPEEDKIT_RUN_DIR": str(tmp_path / "run"), "MPLBACKEND": "Agg"}
    ended = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    record = files.read_json(tmp_path / "run" / "record.json")
    settings = {row["loop"]: row["setting"] for row in record["tables"]["settings"]}
    missing = {loop for loop, setting in settings.items() if setting == "not installed"}
    assert missing == {"Lightning Trainer", "Lightning Fabric", "Accelerate", "transformers Trainer"}
    assert {row["a"] for row in record["measurements"]} == {"bare PyTorch loop"}
    assert [row["finder"] for row in record["tables"]["finders"]] == ["speedkit"]
    assert {row["verdict"] for row in record["verdicts"]} == {"passed"}
