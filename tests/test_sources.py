"""Finding the data: three sources of labels, the split, text, and one sentence for every kind of bad input."""

import csv
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speedkit.data.sources import Item, find_items, find_text, write_quarantine
from speedkit.errors import SpeedkitError, UsageError


def make(path: Path, seconds: float = 0.1, rate_hz: int = 8000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix[1:].upper() or "WAV"
    soundfile.write(path, 0.1 * np.ones(int(seconds * rate_hz)), rate_hz, format=kind)
    return path


def folder_of_classes(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        for number in range(count):
            make(root / name / f"clip{number}.wav")
    return root


def table(path: Path, header: str, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def names(items) -> list[str]:
    return [Path(item.path).name for item in items]


# --- the three sources


def test_folders_of_classes_nested_files_and_odd_ones(tmp_path):
    folder_of_classes(tmp_path, {"owl": 5, "frog": 10})
    make(tmp_path / "owl" / "deep" / "er" / "clip9.flac", 0.25, 16000)
    (tmp_path / "owl" / "notes.txt").write_text("no audio")
    make(tmp_path / "owl" / ".hidden.wav")
    make(tmp_path / ".cache" / "a.wav")
    make(tmp_path / "loose.wav")
    found = find_items(tmp_path)
    assert found.classes == ("frog", "owl")
    assert len(found.train) + len(found.test) == 16 and not found.quarantined
    nested = next(item for item in (*found.train, *found.test) if item.path.endswith("clip9.flac"))
    assert nested == Item(str(tmp_path / "owl/deep/er/clip9.flac"), 1, 0.25, 16000)


def test_items_are_in_natural_order(tmp_path):
    found = find_items(folder_of_classes(tmp_path, {"a": 12, "b": 2}), test_pattern=r"^clip0\.")
    assert names(found.train) == [f"clip{number}.wav" for number in range(1, 12)] + ["clip1.wav"]


def test_file_name_pattern_labels_and_splits_as_the_spoken_digits_do(tmp_path):
    for digit in range(3):
        for take in range(7):
            make(tmp_path / f"{digit}_ann_{take}.wav")
    make(tmp_path / "readme_take.wav")
    found = find_items(tmp_path, label_pattern=r"^(\d)_", test_pattern=r"_[0-4]\.wav$")
    assert found.classes == ("0", "1", "2")
    assert len(found.test) == 15 and names(found.train)[:2] == ["0_ann_5.wav", "0_ann_6.wav"]
    assert [item.label for item in found.train] == [0, 0, 1, 1, 2, 2]


def esc50(root: Path) -> Path:
    rows = []
    for fold in range(1, 6):
        for target, category in ((0, "dog"), (10, "rain")):
            name = f"{fold}-1-A-{target}.wav"
            make(root / "audio" / name)
            rows.append(f"{name},{fold},{target},{category},False,1,A")
    return table(root / "meta" / "esc50.csv", "filename,fold,target,category,esc10,src_file,take", rows)


@pytest.mark.parametrize("data_dir", [".", "audio"])
def test_esc50_table_works_as_it_is(tmp_path, data_dir):
    found = find_items((esc50(tmp_path).parent.parent / data_dir), labels=tmp_path / "meta" / "esc50.csv")
    assert found.classes == ("dog", "rain")  # the names, not the numbers
    assert names(found.test) == ["5-1-A-0.wav", "5-1-A-10.wav"] and len(found.train) == 8
    found = find_items(tmp_path, labels=tmp_path / "meta" / "esc50.csv", test_pattern="^1-")
    assert names(found.test) == ["1-1-A-0.wav", "1-1-A-10.wav"], "the pattern overrides the folds"


def split_table(root: Path, splits: list[str], separator: str = ",") -> Path:
    rows = []
    for number, split in enumerate(splits):
        make(root / f"{number}.wav")
        rows.append(separator.join((f"{number}.wav", "ab"[number % 2], split)))
    return table(root / "all.csv", separator.join(("File", "Label", "Split")), rows)


def test_split_column_with_test_rows_leaves_validation_alone(tmp_path):
    path = split_table(tmp_path, ["train", "train", "TRAIN", "train", "test", "test", "val", "val"], ";")
    found = find_items(tmp_path, labels=path)
    assert names(found.test) == ["4.wav", "5.wav"] and len(found.train) == 4


def test_split_column_with_validation_only_tests_on_it(tmp_path):
    found = find_items(tmp_path, labels=split_table(tmp_path, ["train", "train", "valid", "valid"]))
    assert names(found.test) == ["2.wav", "3.wav"]


# --- the seeded split


def test_split_is_a_fifth_of_each_class_and_follows_the_seed(tmp_path):
    folder_of_classes(tmp_path, {"a": 20, "b": 10, "c": 2})
    found = find_items(tmp_path, seed=3)
    assert [sum(item.label == label for item in found.test) for label in range(3)] == [4, 2, 1]
    assert find_items(tmp_path, seed=3) == found
    assert find_items(tmp_path, seed=4).test != found.test


def test_split_stays_when_other_classes_grow_or_the_folder_moves(tmp_path):
    folder_of_classes(tmp_path / "one", {"a": 20, "b": 10})
    before = find_items(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    folder_of_classes(tmp_path / "two", {"0new": 5, "b": 15})
    after = find_items(tmp_path / "two")
    side = {Path(item.path).name for item in before.test if item.label == 0}
    assert {Path(item.path).name for item in after.test if after.classes[item.label] == "a"} == side


# --- text


def test_text_is_split_by_file_and_leaves_out_what_is_hidden_or_binary(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"file {number}")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "binary").write_bytes(b"bi\0nary")
    train, test = find_text(tmp_path, None, 0)
    assert sorted((train + b"\n" + test).split(b"\n")) == sorted(b"file %d" % number for number in range(20))
    assert test.count(b"file") == 2 and find_text(tmp_path, None, 0) == (train, test) != find_text(tmp_path, None, 1)
    assert find_text(tmp_path, r"^7\.", 0)[1] == b"file 7"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "a.txt").write_bytes(b"0123456789")
    assert find_text(tmp_path / "alone", None, 0) == (b"012345678", b"9")
    library = b"".join(find_text(None, None, 0))
    assert b"def namedtuple(" in library


# --- bad files


def test_bad_and_missing_files_are_quarantined_by_name(tmp_path):
    path = split_table(tmp_path, ["train", "test"] * 30)
    (tmp_path / "40.wav").unlink()
    (tmp_path / "50.wav").write_bytes(b"this is no audio" * 20)
    found = find_items(tmp_path, labels=path)
    reasons = {Path(path).name: why for path, why in found.quarantined}
    assert set(reasons) == {"40.wav", "50.wav"} and reasons["40.wav"] == "it is missing or empty"
    assert "Format not recognised" in reasons["50.wav"] and len(found.train) + len(found.test) == 58


def test_quarantine_is_written_as_csv(tmp_path):
    rows = [("a/b, c.wav", 'it is "empty"'), ("d.wav", "no samples")]
    write_quarantine(tmp_path / "quarantine.csv", rows)
    with (tmp_path / "quarantine.csv").open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [["path", "why"], *map(list, rows)]
    assert [path.name for path in tmp_path.iterdir()] == ["quarantine.csv"]


# --- what cannot be used as asked, beyond what test_bad_input types: classes with their files, options, words

REFUSED = {
    "no class folders": ({".": 2}, {}, "no class-named subfolders", "--label-pattern"),
    "one class": ({"a": 5}, {}, "one class (a)", "needs two"),
    "two sources": ({"a": 2, "b": 2}, {"label_pattern": "(a)", "labels": "a.csv"}, "both name the labels", "one"),
    "only test files": ({"a": 3, "b": 3}, {"test_pattern": "clip"}, "matches 6 of 6", "train"),
    "no test pattern": ({"a": 3, "b": 3}, {"test_pattern": "("}, "not a regular expression", "--test-pattern"),
    "no path": ({".": 2}, {"labels": "recording,label\na.wav,x"}, "recording, label", "one of path"),
    "no label": ({".": 2}, {"labels": "path,kind\na.wav,x"}, "path, kind", "one of label"),
    "no rows": ({".": 2}, {"labels": "path,label"}, "0 rows", "a row per file"),
    "binary": ({".": 2}, {"labels": "\0\1\2\xff\n\0"}, "--labels", "table.csv"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_as_asked_is_one_sentence(name, tmp_path):
    classes, options, *words = REFUSED[name]
    root = folder_of_classes(tmp_path / "data", classes)
    if "label_pattern" not in options and "labels" in options:
        (tmp_path / "table.csv").write_text(options["labels"] + "\n", encoding="utf-8")
        options = {"labels": tmp_path / "table.csv"}
    with pytest.raises(UsageError) as caught:
        find_items(root, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_more_than_one_file_in_twenty_bad_is_an_error(tmp_path):
    folder_of_classes(tmp_path, {"a": 10, "b": 8})
    (tmp_path / "a" / "x.wav").touch()
    with pytest.raises(SpeedkitError, match=r"1 of 19 files cannot be used, over 5%.*x\.wav.*empty.*repair or remove"):
        find_items(tmp_path)
