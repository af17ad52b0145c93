"""The notebooks as they are committed, without a kernel."""

import re

import pytest
from check_notebooks import contract_problems, hand_typed_speedups
from processes import ROOT
from publish import readme_text, records_text

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GENERATED = re.compile(r"<!-- generated:(\w+) -->.*?<!-- /generated:\1 -->", re.DOTALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_contract(path):
    assert contract_problems(path) == []


def test_readme_is_what_the_records_say():
    readme = (ROOT / "README.md").read_text()
    assert readme_text(ROOT / "README.md") == readme, "run `speedkit publish`"
    assert records_text(ROOT / "notebooks") == (ROOT / "notebooks" / "records" / "README.md").read_text()
    assert hand_typed_speedups(GENERATED.sub("", readme)) == []


def test_the_map_in_notebook_00_names_every_notebook():
    first = (ROOT / "notebooks" / "00_start_here.ipynb").read_text()
    others = [path for path in NOTEBOOKS if path.stem != "00_start_here"]
    assert [path.stem for path in others if f"({path.name})" not in first] == []
