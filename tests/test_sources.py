"""Finding the clips: three sources of labels, the split, and one clear sentence for every kind of bad input."""

import csv
import pickle
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speedkit.data.sources import Item, find_items, write_quarantine
from speedkit.errors import SpeedkitError, UsageError


def make(path: Path, seconds: float = 0.1, rate_hz: int = 8000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.ones(int(seconds * rate_hz)), rate_hz)
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


def refused(kind: type[SpeedkitError], *parts: str, **options) -> None:
    """Hold that find_items fails with this very error class, in one sentence with these parts."""
    with pytest.raises(kind) as caught:
        find_items(**options)
    message = str(caught.value)
    assert type(caught.value) is kind and "\n" not in message
    for part in parts:
        assert part in message, message


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


def test_items_are_in_natural_order_and_pickle(tmp_path):
    folder_of_classes(tmp_path, {"a": 12, "b": 2})
    found = find_items(tmp_path, test_pattern=r"^clip0\.")
    assert names(found.train) == [f"clip{number}.wav" for number in range(1, 12)] + ["clip1.wav"]
    assert pickle.loads(pickle.dumps(found)) == found


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


@pytest.mark.parametrize("data_dir", [".", "audio", "meta"])
def test_esc50_table_works_as_it_is(tmp_path, data_dir):
    found = find_items((esc50(tmp_path).parent.parent / data_dir), labels=tmp_path / "meta" / "esc50.csv")
    assert found.classes == ("dog", "rain")  # the names, not the numbers
    assert names(found.test) == ["5-1-A-0.wav", "5-1-A-10.wav"] and len(found.train) == 8


def test_test_pattern_overrides_the_folds(tmp_path):
    found = find_items(tmp_path, labels=esc50(tmp_path), test_pattern="^1-")
    assert names(found.test) == ["1-1-A-0.wav", "1-1-A-10.wav"]


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
    assert not set(names(found.test)) - {Path(item.path).name for item in (*found.train, *found.test)}


def test_split_stays_when_other_classes_grow_or_the_folder_moves(tmp_path):
    folder_of_classes(tmp_path / "one", {"a": 20, "b": 10})
    before = find_items(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    folder_of_classes(tmp_path / "two", {"0new": 5, "b": 15})
    after = find_items(tmp_path / "two")
    side = {Path(item.path).name for item in before.test if item.label == 0}
    assert {Path(item.path).name for item in after.test if after.classes[item.label] == "a"} == side


# --- bad files


def test_bad_files_are_quarantined_by_name(tmp_path):
    folder_of_classes(tmp_path, {"a": 40, "b": 30})
    (tmp_path / "a" / "zero.wav").touch()
    (tmp_path / "a" / "garbage.flac").write_bytes(b"this is no audio" * 20)
    soundfile.write(tmp_path / "b" / "silent.wav", np.zeros(0), 8000)
    found = find_items(tmp_path)
    reasons = {Path(path).name: why for path, why in found.quarantined}
    assert set(reasons) == {"zero.wav", "garbage.flac", "silent.wav"}
    assert "0 bytes" in reasons["zero.wav"] and "decoded" in reasons["garbage.flac"]
    assert "no samples" in reasons["silent.wav"]
    assert len(found.train) + len(found.test) == 70


def test_quarantine_is_written_as_csv(tmp_path):
    rows = [("a/b, c.wav", 'it is "empty"'), ("d.wav", "no samples")]
    write_quarantine(tmp_path / "quarantine.csv", rows)
    with (tmp_path / "quarantine.csv").open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [["path", "why"], *map(list, rows)]
    assert [path.name for path in tmp_path.iterdir()] == ["quarantine.csv"]


def test_more_than_one_file_in_twenty_bad_is_an_error(tmp_path):
    folder_of_classes(tmp_path, {"a": 10, "b": 8})
    (tmp_path / "a" / "x.wav").touch()
    refused(SpeedkitError, "1 of 19", "5%", "x.wav", "0 bytes", "repair or remove", data_dir=tmp_path)


def test_missing_files_of_a_table_are_quarantined_by_name(tmp_path):
    path = split_table(tmp_path, ["train", "test"] * 11 + ["train", "train"])
    (tmp_path / "22.wav").unlink()
    found = find_items(tmp_path, labels=path, test_pattern=r"^[0-3]\.")
    assert found.quarantined == ((str(tmp_path / "22.wav"), "there is no such file"),)


def test_too_many_missing_files_of_a_table_are_an_error(tmp_path):
    path = split_table(tmp_path, ["train"] * 6 + ["test"] * 4)
    (tmp_path / "2.wav").unlink()
    refused(SpeedkitError, "1 of 10", "2.wav", "no such file", data_dir=tmp_path, labels=path)


# --- what cannot be used as asked


def test_missing_empty_and_wrong_folders(tmp_path):
    refused(UsageError, "nowhere", "does not exist", "--data-dir", data_dir=tmp_path / "nowhere")
    refused(UsageError, "no audio files", "--data-dir", data_dir=tmp_path)
    refused(UsageError, "no audio files", data_dir=tmp_path, label_pattern="(a)")
    file = make(tmp_path / "a.wav")
    refused(UsageError, "not a folder", data_dir=file)
    refused(UsageError, "no class-named subfolders", "--label-pattern", data_dir=tmp_path)


def test_class_with_one_file_and_only_one_class(tmp_path):
    folder_of_classes(tmp_path, {"a": 5})
    refused(UsageError, "one class (a)", "needs two", data_dir=tmp_path)
    make(tmp_path / "lonely" / "a.wav")
    refused(UsageError, "class lonely", "one usable file", "add a file", data_dir=tmp_path)


def test_label_patterns_that_cannot_work(tmp_path):
    make(tmp_path / "3_x.wav")
    refused(UsageError, "no group", "parentheses", data_dir=tmp_path, label_pattern=r"^\d_")
    refused(UsageError, "not a regular expression", data_dir=tmp_path, label_pattern="([")
    refused(UsageError, "matches none of the 1", "3_x.wav", data_dir=tmp_path, label_pattern="^(owl)")
    refused(UsageError, "both name the labels", data_dir=tmp_path, label_pattern="(a)", labels="a.csv")


def test_test_patterns_that_leave_a_side_empty(tmp_path):
    folder_of_classes(tmp_path, {"a": 3, "b": 3})
    refused(UsageError, "matches none", "test on", data_dir=tmp_path, test_pattern="owl")
    refused(UsageError, "matches every one", "train on", data_dir=tmp_path, test_pattern="clip")
    refused(UsageError, "not a regular expression", data_dir=tmp_path, test_pattern="(")
    make(tmp_path / "c" / "only1.wav")
    make(tmp_path / "c" / "only2.wav")
    refused(UsageError, "every file of class c", "test set", data_dir=tmp_path, test_pattern="only")


def test_tables_that_cannot_be_used(tmp_path):
    make(tmp_path / "a.wav")

    def says(*parts: str, header: str = "path,label", rows: tuple = ("a.wav,x",)) -> None:
        path = table(tmp_path / "t.csv", header, list(rows))
        refused(UsageError, *parts, data_dir=tmp_path, labels=path)

    says("no path column", "recording, label", header="recording,label")
    says("no label column", "path, kind", header="path,kind")
    says("no rows", rows=())
    says("none of the 1 files", "gone.wav", "--data-dir", rows=("gone.wav,x",))
    says("marks no test set", "train", header="path,label,split", rows=("a.wav,x,train",))
    says("one fold only", header="path,label,fold", rows=("a.wav,x,1",))
    refused(UsageError, "none.csv", "does not exist", data_dir=tmp_path, labels=tmp_path / "none.csv")
    refused(UsageError, "cannot be read", data_dir=tmp_path, labels=tmp_path / "a.wav")
