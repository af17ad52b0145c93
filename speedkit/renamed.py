"""What is called otherwise here: the words of guides, of other libraries, and those of before (renamed.csv)."""

import csv
from pathlib import Path


def spelling_of_today(word: str, *, typed: bool = False) -> str:
    """Return `: here that is X` for what others call `word`, as a field or as it is `typed`; "" for any other word."""
    # A row is a setting of today, or `setting=value`; a note; and what it is called elsewhere.
    with Path(__file__).with_name("renamed.csv").open(encoding="utf-8", newline="") as table:
        for here, note, elsewhere in csv.reader(table):
            if word.lower().lstrip("-").replace("-", "_") in elsewhere.split():
                option = f"--{here.replace('_', '-').replace('=', ' ')}" if typed else here
                return f": here that is {option} {note}".rstrip() if here else f": {note}"
    return ""
