"""How a notebook of this repository is written, as rules.

nbval passes a stripped notebook without comparing anything, so that checked cells have outputs is a rule here.
"""

import re
from pathlib import Path
from typing import Any

from publish import WIDGET_VIEW, code_cells, record_of

from speedkit.errors import UsageError
from speedkit.lab.notebooks import declared_parameters
from speedkit.lab.record import RECORD_MIME, read_notebook
from speedkit.lab.records import validate_record

MAX_BYTES = 300_000
MAX_WORDS = 1200  # of prose
MAX_LINES = 150  # of code, beside the parameters
MAX_COLUMNS = 88  # of what is typed off: a block of more scrolls sideways on a page of 900 pixels
CHECKED = "nbval-check-output"
IGNORED = "nbval-ignore-output"  # measured here, or drawn from it: another machine shows something else
HEADINGS = ("predict", "does not help", "exercise", "next")
# "3x", "1.5 ×", "2-fold", "40 % faster", "twice as fast"; "3x3" and "3 × 3" are sizes.
HAND_TYPED = re.compile(
    r"(?<![\w.])\d+(\.\d+)?\s?([x×](?![\w-]|\s?\d)|-?fold\b|times\s+(as\s+)?(fast|slow|quick|less|more))"
    r"|\d\s?(%|per\s?cent)\s+(faster|slower|quicker|less|more|speed|saved|of the time)"
    r"|\b(twice|thrice)\s+as\s+(fast|slow|quick)",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
UNITS = (1, 1e2, 1e3, 1e6, 1e-6)  # a record has seconds, bytes and shares; a sentence ms, µs, MB and per cent
SECONDS = re.compile(r"'(long_)?seconds_[ab]': \[[^\]]*\]")  # of single turns, which no figure shows
SMALL = 4  # up to which a number counts things, and is in no table


def contract_problems(path: Path) -> list[str]:
    """Return what is wrong with the notebook at `path`, how it is written and what it shows; [] when nothing is."""
    try:
        notebook = read_notebook(path)
        declared_parameters(path)
    except UsageError as error:
        return [str(error)]
    code = code_cells(notebook)
    record = record_of(notebook) or {}
    own = [cell for cell in code if "colab" not in _tags(cell)]
    lines = re.findall(r"^.*\S", "\n".join(cell.source for cell in own[1:]), re.MULTILINE)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    blocks = [code[0].source, *re.findall(r"^```.*?^```", prose, re.MULTILINE | re.DOTALL)]
    headings = " | ".join(re.findall(r"^#+ (.*)$", prose, re.MULTILINE)).lower()
    outputs = [output for cell in code for output in cell.outputs]
    checked = [cell for cell in code if CHECKED in _tags(cell)]
    printed = [output.get("text", "?") for cell in checked for output in cell.outputs]
    metadata = {key for cell in notebook.cells for key in {*cell.metadata} - {"tags", "jupyter"}}
    metadata |= {tag for cell in notebook.cells for tag in _tags(cell) - {"parameters", CHECKED, IGNORED, "colab"}}
    factors = hand_typed_speedups(prose)
    unfounded = unfounded_numbers(notebook)
    rules = {
        f"it has more than {MAX_BYTES} bytes": path.stat().st_size <= MAX_BYTES,
        f"it has more than {MAX_WORDS} words": len(prose.split()) <= MAX_WORDS,
        f"it has more than {MAX_LINES} lines of code": len(lines) <= MAX_LINES,
        "its first cell is not a title (`# ...`)": notebook.cells[0].source.startswith("# "),
        f"its headings do not say {', '.join(HEADINGS)}": all(words in headings for words in HEADINGS),
        "no solution is collapsed": "<details" in prose,
        f"it states speed-ups by hand: {factors}": not factors,
        "its first code cell is not the parameters cell": "parameters" in _tags(code[0]),
        "a parameter has no comment on its line": all(
            "  # " in line for line in re.findall(r"^\w+:.*", code[0].source, re.M)
        ),
        f"a parameter or a block in its prose has more than {MAX_COLUMNS} columns": all(
            len(line) <= MAX_COLUMNS for block in blocks for line in block.splitlines()
        ),
        "its last code cell does not call run.save()": ".save()" in code[-1].source,
        "it does not show one record, its own": record.get("notebook") == path.stem
        and sum(RECORD_MIME in output.get("data", {}) for output in outputs) == 1,
        "its execution counts are not those of one run": [cell.execution_count for cell in code]
        == [*range(1, len(code) + 1)],
        "it shows an error, stderr or a widget": not any(
            output.output_type == "error" or output.get("name") == "stderr" or WIDGET_VIEW in output.get("data", {})
            for output in outputs
        ),
        "no cell is tagged, or one has no output: nbval would compare nothing": checked
        and all(cell.outputs for cell in checked),
        f"a code cell is tagged neither {CHECKED} nor {IGNORED}, or both": all(
            len(_tags(cell) & {CHECKED, IGNORED}) == 1 for cell in own
        ),
        "a checked cell shows lines that do not begin with PASS": all(
            line.startswith("PASS ") for shown in printed for line in shown.splitlines()
        ),
        f"it has the metadata or tags {sorted(metadata)}": not metadata,
        f"it tells numbers that nothing beside them shows: {unfounded}": not unfounded,
    }
    return [problem for problem, holds in rules.items() if not holds] + validate_record(record)


def hand_typed_speedups(text: str) -> list[str]:
    """Return the phrases of Markdown `text` that state a speed-up, which only a record may do."""
    return [match[0] for match in HAND_TYPED.finditer(text)]


def unfounded_numbers(notebook: Any) -> list[str]:
    """Return the numbers in what `run.tell` says that are neither in the record nor in what else the lesson shows."""
    told, shown = [], []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            shown.append(cell.source)
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            sentences = data.get("text/markdown") if ".tell(" in cell.source else None
            if sentences is not None:
                told += [line for line in sentences.splitlines() if not line.startswith("|")]
            else:
                kinds = [kind for kind in data if not kind.startswith("image/")]
                shown += [output.get("text", ""), *(SECONDS.sub("", str(data[kind])) for kind in kinds)]
                shown.append(output.get("metadata", {}).get("image/png", {}).get("alt", ""))  # a figure's title
    known = [value for text in shown for _, value in numbers_in(re.sub(r"<[^>]*>", " ", text))]
    return [number for line in told for number, value in numbers_in(line) if not _is_known(number, value, known)]


def numbers_in(text: str) -> list[tuple[str, float]]:
    """Return the numbers of a text as written and as values; names such as C12 and the numbers of a list are none."""
    written = NUMBER.findall(re.sub(r"^\d+\. ", "", text))
    return [(number, float(number.rstrip(",").replace(",", ""))) for number in written]


def _is_known(number: str, value: float, known: list[float]) -> bool:
    """Return whether a number is one of the known ones, rounded to its last digit, in whatever unit."""
    if value <= SMALL and value == int(value):
        return True
    mantissa, _, exponent = number.rstrip(",").replace(",", "").partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return any(abs(value - unit * each) <= 0.501 * last_digit for each in known for unit in UNITS)


def _tags(cell: Any) -> set[str]:
    return set(cell.metadata.get("tags", []))
