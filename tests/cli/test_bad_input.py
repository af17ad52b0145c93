"""What a user can get wrong: one sentence, the right exit code, no traceback, and nothing half-written."""

import csv
import pathlib
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import soundfile

import speedkit as package
from speedkit import cli
from speedkit.config import from_mapping, settings_of
from speedkit.plan import Plan

SMALL = ("--size", "tiny", "--batch-size", "8")

# What is typed, and what the sentence must say, word by word.
BAD_INPUT = {
    # The command and its options.
    "dance": "No such command 'dance'",
    "train": "Missing argument 'WORKLOAD'",
    "train audio --no-such-option": "--no-such-option",
    "train audio --clips many": "--clips|'many'|not a valid integer",
    "train audio --clips 0": "--clips|0 is not in the range",
    "train audio --clips -5": "--clips|-5 is not in the range",
    # Workload and device.
    "train audoi": "did you mean audio|package.module:function",
    "train no_such_module:thing": "'no_such_module:thing' cannot be loaded",
    "train os:getcwd": "os:getcwd returned str, not a Workload",
    "train audio --device tpu": "tpu|this machine has|cpu",
    "train audio --device cuda:99": 'device "cuda:99" is not available',
    "train audio --data-dir tones --size huge": "huge|tiny",
    "train audio --data-dir tones --width 20": "no net of width 20 and depth 1|a multiple of 8",
    # Fields of the recipe and the plan.
    "train audio --precision bf61": "precision='bf61' is not possible|did you mean bf16",
    "train audio --precision 32": "precision=32 is not possible: here that is precision=fp32",
    "train audio --validate-every 1.5": "validate_every=1.5|a number from 0.01 to 1",
    "train audio --batch-size 0": "batch_size=0|an integer from 1",
    "train audio --learning-rate nan": "learning_rate=nan|a number from 0",
    "train audio --max-duration-s 0": "max_duration_s=0|from 0.01",
    "train audio --epochs 2 --steps 3": "epochs or steps, one of the two",
    "train audio --precision fp8 --strict --device cpu": "--strict allows no fallback|FP8",
    # Validation.
    "train audio --data-dir tones --validation 0": "--validation|0 is not in the range",
    "train audio --data-dir tones --validation 1": "--validation|1.0 is not in the range",
    # Plan files.
    "train audio --plan fats": "there is no plan 'fats'|baseline, careful, fast",
    "train audio --plan list.yaml": "list.yaml: it must hold",
    "train audio --plan broken.yaml": "broken.yaml: while parsing",
    "train audio --plan old.yaml": "old.yaml: 'num_workers' is not a field of Plan: here that is workers",
    "train audio --plan mixed.yaml": "mixed.yaml: precision='bf16-mixed'|here that is precision=bf16",
    "train audio --plan recipe.yaml": "recipe.yaml: 'batch_size' is not a field of Plan|what is learned",
    "train audio --plan wrong.yaml": "wrong.yaml: cache='disc'|did you mean disk",
    # Data.
    "train audio --data-dir missing": "missing does not exist",
    "train audio --data-dir empty": "empty",
    "train audio --data-dir tones --labels missing.csv": "missing.csv|--labels",
    "train audio --data-dir tones --label-pattern (": "'('|--label-pattern",
    "train audio --data-dir tones --test-pattern nothing_has_this": "--test-pattern",
    "train audio --data-dir tones --focal-gamma 2": "focal_gamma=2.0 is not applied by workload audio",
    "train audio --data-dir tones --clips 100": "leave it out",
    "train text --data-dir empty": "holds no text files",
    "train image --clips 8 --max-duration-s 3": "cannot be loaded|max_duration_s",
    "train speech --clips 8 --max-duration-s 0.1": "too few clips last up to 0.1 s",
    # Output folders.
    "train audio --data-dir tones --out file/run": "file/run cannot be written",
    "train audio --data-dir tones --out tones": "tones already holds files that speedkit did not write",
    # Times and counts.
    "tune audio --budget soon": "'soon' is no time|9m",
    "tune audio --seeds 1": "--seeds|1 is not in the range",
    "tune audio --data-dir tones --optimizations cahce": "there is no optimization 'cahce'|did you mean cache",
    "compare baseline fast audio --pairs 1": "--pairs|1 is not in the range",
    # Caches, traces and checkpoints.
    "cache clean empty": "'clean' is not one of|'repair'",
    "cache info empty": "empty holds no feature cache",
    "profile audio --data-dir tones --size tiny --out seen --trace no/t.json": "trace cannot be written to no/t.json",
    # Scripts.
    "profile --plan fast train.py": "--plan is for a workload",
    "profile missing.py": "there is no script missing.py",
    "profile audio extra": "'extra' is one argument too many",
    "profile audio --stop": "--stop is for a script, NAME.py",
    "profile audio --hang 5s": "--hang is for a script, NAME.py",
    # Notebooks.
    "run 77": 'there is no notebook "77"|01_measure',
    "run 01 -p no_such 3": 'no parameter "no_such"|it has',
    "run 01 -p pair 3": 'no parameter "pair" (did you mean pairs?)',
    "run 01 -p pairs none": "01_measure.ipynb|pairs='none' is not possible",
    "run 01 -p planted nan": "finite number",
    "cache build somewhere --part 4/3": "'4/3' is no part: write 3/16 for the third of sixteen",
    "run 22 -p widths 1,x": "widths=['1', 'x'] is not possible",
    "run 01 --sweep scale": "--sweep takes NAME=A,B,C",
    "run 01 --cluster tcp://nowhere:1": "--cluster runs its combinations",
    "run 01 --timeout 0": "'0' is no time|9m",
}


@pytest.fixture(scope="module")
def folder(recordings, tmp_path_factory):
    """A folder with some recordings, and with everything that can be wrong."""
    root = tmp_path_factory.mktemp("bad")
    (root / "tones").symlink_to(recordings)
    (root / "empty").mkdir()
    texts = {
        "file": "",
        "train.py": "",
        "list.yaml": "- workers: 2\n",
        "broken.yaml": "cache: [ram\n",
        "old.yaml": "num_workers: 4\n",
        "wrong.yaml": "cache: disc\n",
        "mixed.yaml": "precision: bf16-mixed\n",
        "recipe.yaml": "batch_size: 8\n",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_sentence(words, folder, speedkit, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("speedkit.busy.others", dict)  # whatever else this machine does
    files = {*folder.rglob("*")}
    code, _, complaint = speedkit(*words.split())
    assert code == 2, complaint
    assert complaint.startswith("speedkit: ") and complaint.count("\n") == 1, complaint
    assert all(word in complaint for word in BAD_INPUT[words].split("|")), complaint
    left = {path.relative_to(folder).parts[0] for path in {*folder.rglob("*")} - files}
    assert left <= {"seen"}, "nothing half-written"


@pytest.mark.parametrize("words", ["train", "tune", "profile", "compare baseline fast"])
@pytest.mark.parametrize("suffix", ["header", "samples"])
def test_too_many_bad_files_are_listed_where_the_output_goes_and_nowhere_else(
    words, suffix, speedkit, recordings, tmp_path
):
    """Files without a header, which no run begins with, and files of NaN, which are found in the midst of it."""
    files = shutil.copytree(recordings, tmp_path / "files")
    for number in range(40):
        path = files / "low" / f"bad{number}.wav"
        path.write_bytes(b"no audio")
        if suffix == "samples":
            soundfile.write(path, np.full(4000, np.nan, np.float32), 8000, subtype="FLOAT")
    options = ["audio", "--data-dir", files, *SMALL, "--out", tmp_path / "out"]
    code, _, complaint = speedkit(*words.split(), *options)
    listed = (tmp_path / "out" / "quarantine.csv").read_text()
    assert code == 1 and f"over 5%, in {files}/low: bad" in complaint
    five = "bad0.wav, bad1.wav, bad10.wav, bad11.wav, bad12.wav (the first"
    assert five in complaint or suffix == "samples", complaint
    assert f"{tmp_path}/out/quarantine.csv lists all" in complaint and listed.count(".wav") > 3
    if words == "train":  # a folder of the user's own stays as it is
        assert speedkit(*words.split(), *options[:-1], files)[0] > 0 and not (files / "quarantine.csv").exists()


with pathlib.Path(package.__file__).with_name("renamed.csv").open() as table:
    next(table)  # the names of its columns
    RENAMED = {word: row for row in csv.reader(table) for word in row[2].split() if "=" not in word}


def test_what_a_word_from_elsewhere_leads_to_is_there():
    options = {option.name for command in cli.commands.commands.values() for option in command.params}
    for here, note, _ in RENAMED.values():
        name, _, value = here.partition("=")
        assert name in options or (note and not name), here
        if value and name in settings_of(Plan):
            from_mapping(Plan, {name: value})


@pytest.mark.slow
def test_a_word_from_elsewhere_is_told_the_one_of_today_wherever_it_is_typed(speedkit):
    for word, (here, note, _) in RENAMED.items():
        name, option = (here, f"--{here.replace('_', '-').replace('=', ' ')}") if here else ("", "")
        answers = {f"hardware --{word}": f"{option} {note}".strip(), f"run 01 -p {word} 3": f"{name} {note}".strip()}
        if word not in cli.commands.commands and find_spec(f"speedkit.{word}") is None:
            answers[word] = f"{option} {note}".strip()
            with pytest.raises(AttributeError) as error:
                getattr(package, word)
            assert str(error.value).endswith(f"{name} {note}".strip())
        for words, says in answers.items():
            code, _, complaint = speedkit(*words.split())
            assert code == 2 and complaint.endswith(f"{says}\n") and complaint.count("\n") == 1, complaint
