"""A file that is not as it was written is set aside, and told of."""

import math
import os

import pytest

from speedkit.measure.checked_file import read_checked, write_checked

DAMAGED = [
    '{"stages": [1, 2',
    "another number",
    '{"stages": [1, 2]}',
    "[1]",
    "1",
    "null",
    "{}",
    "\udcff",
    "",
    "[" * 100_000,
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda text: text[:20])
def test_a_damaged_file_is_set_aside_and_told_of(tmp_path, damaged):
    path, said = tmp_path / "a.json", []
    assert read_checked(path, pytest.fail) is None
    write_checked(path, {"stages": [1, 2], "loss": math.nan})
    assert read_checked(path, pytest.fail) == {"stages": [1, 2], "loss": None}
    changed = path.read_text().replace("2", "3") if damaged == "another number" else damaged
    path.write_text(changed, errors="surrogateescape")
    assert read_checked(path, said.append) is None and not path.exists()
    assert str(path) in said[0] and (tmp_path / "a.json.damaged").read_bytes() == os.fsencode(changed)
