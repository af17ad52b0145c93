"""Training from tars that one already has: where labels come from, what is refused, and that nothing is extracted."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

import speedkit
from speedkit.errors import UsageError
from speedkit.lab.sources import find_items
from speedkit.lab.tars import TarMember
from speedkit.plan import Plan
from speedkit.train.fit import fit


def write_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tars(folder, recordings, layout, tars=3):
    """Write recordings to tars whose labels are given as `layout` says; return the tars' pattern."""
    paths = sorted(recordings.glob("*/*.wav"))
    for number in range(tars):
        files = {"./README.md": b"not a clip", "._0.wav": b"what macOS leaves", "take.wav": b"no label"}
        for path in paths[number::tars]:
            label, key, clip = path.parent.name, path.stem, path.read_bytes()
            files |= {
                "cls": {f"{key}.wav": clip, f"{key}.cls": label.encode()},
                "json": {f"{key}.wav": clip, f"{key}.json": json.dumps({"category": label}).encode()},
                "txt": {f"a/{key}.wav": clip, f"a/{key}.txt": f"{label}\n".encode()},
                "folders": {f"./clips/{label}/{key}.wav": clip},
                "names": {f"{key}.wav": clip},
                "outside": {f"../../{label}/../{label}/{key}.wav": clip},
            }[layout]
        write_tar(folder / f"clips-{number:04d}.tar", files)
    return str(folder / f"clips-{{0000..{tars - 1:04d}}}.tar")


@pytest.mark.parametrize("layout", ["cls", "json", "txt", "folders", "names", "outside"])
def test_labels_come_from_the_members_beside_from_folders_or_from_names(layout, recordings, tmp_path, monkeypatch):
    pattern = write_tars(tmp_path, recordings, layout)
    label_pattern = "^(low|high)" if layout == "names" else None
    split = find_items(pattern, label_pattern=label_pattern)
    assert split.classes == ("high", "low") and not split.quarantined
    assert len(split.train) + len(split.test) == 48 and {item.duration_s for item in split.train} == {0.5}
    for item in split.train:
        path = recordings / split.classes[item.label] / Path(item.path.name).name
        assert item.path.read() == path.read_bytes()
        with monkeypatch.context() as windows:
            windows.delattr(os, "pread")
            assert item.path.read() == path.read_bytes()
    assert find_items(tmp_path / "clips-*.tar", label_pattern=label_pattern) == split
    assert {path.suffix for path in tmp_path.iterdir()} == {".tar"}, "nothing is extracted"


def test_a_table_names_members_and_what_cannot_be_read_is_left_out(recordings, tmp_path):
    write_tars(tmp_path, recordings, "names", tars=1)
    rows = [f"{path.name},{path.stem[0]},{index % 4}" for index, path in enumerate(recordings.glob("*/*.wav"))]
    (tmp_path / "all.csv").write_text("\n".join(["file,label,fold", *rows]))
    split = find_items(tmp_path / "clips-0000.tar", labels=tmp_path / "all.csv")
    assert split.classes == ("h", "l") and len(split.test) == 12 and isinstance(split.test[0].path, TarMember)
    write_tar(tmp_path / "clips-0003.tar", {"low_48.wav": b"RIFF no clip"})
    [(path, why)] = find_items(tmp_path / "clips-*.tar", label_pattern="^(low|high)").quarantined.items()
    assert path == f"{tmp_path}/clips-0003.tar/low_48.wav" and why


def test_a_training_from_tars_is_that_from_files(recordings, tmp_path):
    losses = []
    for folder in (recordings, write_tars(tmp_path, recordings, "folders", tars=1)):
        workload = speedkit.load_workload("audio", data_dir=folder, test_pattern=r"_\d\.", size="tiny")
        plan, cache_dir = Plan(cache="disk", log_every=1), tmp_path / "cache"
        losses.append(fit(workload, plan=plan, device="cpu", progress=False, cache_dir=cache_dir).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing-{0..1}.tar", r"missing-0.tar cannot be read \(.*No such file"),
        ("none-*.tar", r"none-\*.tar cannot be read"),
        ("small.tar.gz", "small.tar.gz cannot be read .* not compressed"),
        ("flat.tar", r"flat.tar has 2 audio files .*, none with a label"),
        ("fifo.tar", "fifo.tar cannot be read .*not a file"),
        ("terabyte.tar", "terabyte.tar cannot be read"),
        ("beyond.tar", "beyond.tar cannot be read"),
        ("below.tar", "below.tar cannot be read"),
        ("nested.tar", "nested.tar cannot be read"),
    ],
)
def test_what_is_no_usable_tar_is_one_sentence(name, says, tmp_path):
    os.mkfifo(tmp_path / "fifo.tar")
    for word, size, times in (
        ("terabyte", 2**40, 1),
        ("beyond", 2**70, 1),
        ("below", -(2**40), 1),
        ("nested", 0, 5000),
    ):
        info = tarfile.TarInfo("././@LongLink")  # the name of the next member, which may be of any length
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
        (tmp_path / f"{word}.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) * times + bytes(1024))
    write_tar(tmp_path / "small.tar.gz", {"a/1.wav": b"RIFF"}, "w:gz")
    write_tar(tmp_path / "flat.tar", {"1.wav": b"RIFF", "2.wav": b"RIFF"})
    with pytest.raises(UsageError, match=says):
        speedkit.load_workload("audio", data_dir=tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("0.cls", b"caf\xe9", "utf-8"),
        ("0.txt", b"caf\xe9", "utf-8"),
        ("0.json", b"{", "property name"),
        ("0.json", b"3", "not a JSON object"),
        ("0.json", b'["label"]', "not a JSON object"),
        ("0.json", b'{"label": ["a"]}', "label is not a text"),
        ("0.json", b"[" * 100_000, "recursion"),
    ],
)
def test_a_label_that_cannot_be_read_is_told_with_its_file(name, data, says, tmp_path):
    write_tar(tmp_path / "labels.tar", {"0.wav": b"RIFF", name: data})
    with pytest.raises(UsageError, match=f"labels.tar/{name} cannot be read as a label .*{says}"):
        find_items(tmp_path / "labels.tar")
