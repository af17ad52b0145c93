"""Finding the data: three sources of labels, the split, text, and one sentence for what cannot be used."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import write_quarantine
from speedkit.lab.sources import Item, find_items, find_text


def make(path, seconds=0.1, rate_hz=8000):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.ones(int(seconds * rate_hz)), rate_hz)


def folder_of_classes(root, **counts):
    for name, count in counts.items():
        for number in range(count):
            make(root / name / f"clip{number}.wav")
    return root


def table(root, header, *rows):
    path = root / "meta" / "all.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def names(items):
    return [Path(item.path).name for item in items]


def test_folders_of_classes_nested_files_and_odd_ones(tmp_path):
    folder_of_classes(tmp_path, owl=5, frog=11)
    make(tmp_path / "owl" / "deep" / "er" / "clip9.flac", 0.25, 16000)
    (tmp_path / "owl" / "notes.txt").write_text("no audio")
    make(tmp_path / "owl" / ".hidden.wav")
    make(tmp_path / ".cache" / "a.wav")
    make(tmp_path / "loose.wav")
    split = find_items(tmp_path, test_pattern=r"^clip[01]\.")
    assert split.classes == ("frog", "owl") and not split.quarantined
    frogs = ["clip10.wav", *(f"clip{number}.wav" for number in range(2, 10))]
    assert names(split.train) == [*frogs, "clip2.wav", "clip3.wav", "clip4.wav", "clip9.flac"]
    assert split.train[-1] == Item(str(tmp_path / "owl/deep/er/clip9.flac"), 1, 0.25, 16000)


@pytest.mark.parametrize("data_dir", [".", "audio"])
def test_esc50_table_works_as_it_is(tmp_path, data_dir):
    classes = ("0", "dog"), ("10", "rain")
    rows = [f"{fold}-A-{number}.wav,{fold},{number},{name}" for fold in range(1, 6) for number, name in classes]
    path = table(tmp_path, "filename,fold,target,category", *rows)
    for row in rows:
        make(tmp_path / "audio" / row.split(",")[0])
    split = find_items(tmp_path / data_dir, labels=path)
    assert split.classes == ("dog", "rain")  # the names, not the numbers
    assert names(split.test) == ["5-A-0.wav", "5-A-10.wav"] and len(split.train) == 8
    split = find_items(tmp_path, labels=path, test_pattern="^1-")
    assert names(split.test) == ["1-A-0.wav", "1-A-10.wav"], "the pattern overrides the folds"


@pytest.mark.parametrize(
    ("column", "splits", "test", "train", "validation"),
    [
        ("Split", "train train TRAIN train test test val val", [4, 5], [0, 1, 2, 3], [6, 7]),
        ("Split", "train train valid valid", [2, 3], [0, 1], []),
        ("Fold", "fold9 fold9 fold10 fold10", [2, 3], [0, 1], []),
    ],
)
def test_a_split_column_says_what_to_test_on(tmp_path, column, splits, test, train, validation):
    rows = [f"{number}.wav;{'ab'[number % 2]};{split}" for number, split in enumerate(splits.split())]
    for number in range(len(rows)):
        make(tmp_path / f"{number}.wav")
    split = find_items(tmp_path, labels=table(tmp_path, f"File;Label;{column}", *rows))
    assert names(split.test) == [f"{number}.wav" for number in test]
    assert names(split.train) == [f"{number}.wav" for number in train]
    assert names(split.validation) == [f"{number}.wav" for number in validation]


def test_split_is_a_fifth_of_each_class_and_stays_when_the_data_grows(tmp_path):
    split = find_items(folder_of_classes(tmp_path / "one", a=20, b=10, c=2))
    assert [sum(item.label == label for item in split.test) for label in range(3)] == [4, 2, 1]
    (tmp_path / "one").rename(tmp_path / "two")
    grown = find_items(folder_of_classes(tmp_path / "two", b=15, d=5))
    assert names(item for item in grown.test if item.label == 0) == names(split.test)[:4]


def test_text_is_split_by_file_and_leaves_out_what_is_hidden_or_binary(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"file {number}")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "binary").write_bytes(b"bi\0nary")
    train, test = find_text(tmp_path, None)
    assert sorted((train + b"\n" + test).split(b"\n")) == sorted(b"file %d" % number for number in range(20))
    assert test.count(b"file") == 2 and find_text(tmp_path, r"^7\.")[1] == b"file 7"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "a.txt").write_bytes(b"0123456789")
    assert find_text(tmp_path / "alone", None) == (b"012345678", b"9")
    assert b"def namedtuple(" in b"".join(find_text(None, None))


def test_bad_and_missing_files_are_quarantined_by_name_and_more_than_one_in_twenty_is_an_error(tmp_path):
    folder_of_classes(tmp_path, a=20, b=20)
    (tmp_path / "a" / "clip3.wav").write_bytes(b"this is no audio" * 20)
    rows = [f"{name}/clip{number}.wav,{name}" for name in "ab" for number in range(20)]
    path = table(tmp_path, "path,label", *rows, "a/gone.wav,a")
    split = find_items(tmp_path, labels=path)
    reasons = {Path(path).name: why for path, why in split.quarantined.items()}
    assert set(reasons) == {"clip3.wav", "gone.wav"} and "Format not recognised" in reasons["clip3.wav"]
    assert len(split.train) + len(split.test) == 39
    with pytest.raises(
        SpeedkitError, match=r"3 of 42 .* over 5%, in .*: a/clip3.wav, a/gone.wav, b/gone.wav"
    ) as caught:
        find_items(tmp_path, labels=table(tmp_path, "path,label", *rows, "a/gone.wav,a", "b/gone.wav,b"))
    assert f"in {tmp_path}:" in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each file name is a text")
def test_a_file_whose_name_is_no_text_is_left_out_and_named(tmp_path):
    folder_of_classes(tmp_path / "data", owl=20, frog=20)
    os.link(tmp_path / "data/owl/clip0.wav", os.fsencode(tmp_path / "data" / "owl") + b"/caf\xe9.wav")
    split = find_items(tmp_path / "data", test_pattern=None)
    write_quarantine(tmp_path / "quarantine.csv", split.quarantined)
    assert len(split.quarantined) == 1 and b"/caf\xe9.wav," in (tmp_path / "quarantine.csv").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs in folders")
def test_a_fifo_is_never_waited_for(tmp_path):
    folder_of_classes(tmp_path, owl=20, frog=20)
    os.mkfifo(tmp_path / "owl" / "fifo.wav")
    assert not find_items(tmp_path).quarantined
    rows = [f"{name}/clip{number}.wav,{name}" for name in ("owl", "frog") for number in range(20)]
    for kind in ("audio", "image"):
        split = find_items(tmp_path, labels=table(tmp_path, "path,label", *rows, "owl/fifo.wav,owl"), kind=kind)
        assert [(Path(path).name, why) for path, why in split.quarantined.items()] == [("fifo.wav", "it is not a file")]
    os.mkfifo(tmp_path / "fifo.csv")
    with pytest.raises(UsageError, match=r"fifo.csv cannot be read .*not a file"):
        find_items(tmp_path, labels=tmp_path / "fifo.csv")


def test_a_column_of_a_table_that_is_there_twice_is_the_first(tmp_path):
    rows = [f"owl/clip{number}.wav,owl,x" for number in range(5)] + [
        f"frog/clip{number}.wav,frog,x" for number in range(5)
    ]
    folder_of_classes(tmp_path, owl=5, frog=5)
    assert find_items(tmp_path, labels=table(tmp_path, "path,Label,label", *rows)).classes == ("frog", "owl")


def test_an_image_that_a_table_names_and_is_not_there_is_found_before_training(tmp_path):
    path = table(tmp_path, "path,label", "gone.png,a", "lost.png,b")
    with pytest.raises(SpeedkitError, match=r"2 of 2 files cannot be used.*gone.png, lost.png .*No such file"):
        find_items(tmp_path, labels=path, kind="image")


def test_a_folder_with_one_file_a_class_leaves_nothing_to_train_on_and_says_so(tmp_path):
    folder_of_classes(tmp_path, owl=1, frog=1)
    with pytest.raises(UsageError, match="none of the 2 files is left to train on"):
        find_items(tmp_path)
    folder_of_classes(tmp_path, owl=2)
    split = find_items(tmp_path)
    assert (len(split.train), len(split.test)) == (1, 2)
