"""Training from tars that one already has: where labels come from, what is refused, and that nothing is extracted."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile

import speedkit
from speedkit.data.decode import TarMember
from speedkit.errors import UsageError
from speedkit.lab.sources import find_items
from speedkit.plan import Plan
from speedkit.train.fit import fit

RATE_HZ = 8000


def wav(index: int, frames: int = 1600) -> bytes:
    file, rng = io.BytesIO(), np.random.default_rng(index)
    tone = np.sin(2 * np.pi * (300, 1500)[index % 2] * np.arange(frames) / RATE_HZ)
    soundfile.write(file, 0.2 * tone + rng.normal(0, 0.05, frames), RATE_HZ, format="WAV")
    return file.getvalue()


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_tars(folder: Path, layout: str, count: int = 48, tars: int = 3) -> str:
    """Write clips of two classes to tars whose labels are given as `layout` says; return the tars' pattern."""
    for number in range(tars):
        files = {"./README.md": b"not a clip", "._0.wav": b"what macOS leaves"}
        for index in range(number, count, tars):
            label, key, clip = ("low", "high")[index % 2], f"{index:04d}", wav(index)
            files |= {
                "cls": {f"{key}.wav": clip, f"{key}.cls": str(index % 2).encode()},
                "json": {f"{key}.wav": clip, f"{key}.json": json.dumps({"category": label}).encode()},
                "txt": {f"a/{key}.wav": clip, f"a/{key}.txt": f"{label}\n".encode()},
                "folders": {f"./clips/{label}/{key}.wav": clip},
                "names": {f"{key}_{label}.wav": clip},
                "outside": {f"../../{label}/../{label}/{key}.wav": clip},
            }[layout]
        write_tar(folder / f"clips-{number:04d}.tar", files)
    return str(folder / f"clips-{{0000..{tars - 1:04d}}}.tar")


@pytest.mark.parametrize("layout", ["cls", "json", "txt", "folders", "names", "outside"])
def test_labels_come_from_the_members_beside_from_folders_or_from_names(layout, tmp_path):
    pattern = write_tars(tmp_path, layout)
    split = find_items(pattern, label_pattern="_(low|high)" if layout == "names" else None)
    assert split.classes == (("0", "1") if layout == "cls" else ("high", "low")) and not split.quarantined
    assert len(split.train) + len(split.test) == 48 and {item.duration_s for item in split.train} == {0.2}
    for item in split.train:
        index = int(Path(item.path.name).stem[:4])
        assert item.path.read() == wav(index) and item.label == (index % 2 if layout == "cls" else 1 - index % 2)
    assert find_items(tmp_path / "clips-*.tar", label_pattern="_(low|high)" if layout == "names" else None) == split
    assert {path.suffix for path in tmp_path.iterdir()} == {".tar"}, "nothing is extracted"


def test_a_table_names_members_and_what_cannot_be_read_is_left_out(tmp_path):
    write_tars(tmp_path, "names", tars=1)
    rows = [f"{index:04d}_{('low', 'high')[index % 2]}.wav,{'ab'[index % 2]},{index % 4}" for index in range(48)]
    (tmp_path / "all.csv").write_text("\n".join(["file,label,fold", *rows]))
    split = find_items(tmp_path / "clips-0000.tar", labels=tmp_path / "all.csv")
    assert split.classes == ("a", "b") and len(split.test) == 12 and isinstance(split.test[0].path, TarMember)
    write_tar(tmp_path / "clips-0003.tar", {"0048_low.wav": b"RIFF no clip"})
    [(path, why)] = find_items(tmp_path / "clips-*.tar", label_pattern="_(low|high)").quarantined
    assert path == f"{tmp_path}/clips-0003.tar/0048_low.wav" and why


def test_a_training_from_tars_is_that_from_files(tmp_path):
    (tmp_path / "tars").mkdir()
    for index in range(24):
        path = tmp_path / "files" / ("low", "high")[index % 2] / f"{index:04d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wav(index))
    pattern, options = write_tars(tmp_path / "tars", "folders", count=24, tars=1), {"size": "tiny"}
    losses = []
    for folder in (tmp_path / "files", pattern):
        workload = speedkit.load_workload("audio", data_dir=folder, test_pattern=r"000\d\.", **options)
        plan, cache = Plan(cache="disk", log_every=1), {"cache_dir": tmp_path / "cache"}
        losses.append(fit(workload, plan=plan, device="cpu", progress=False, **cache).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing-{0..1}.tar", r"missing-0.tar cannot be read \(.*No such file"),
        ("none-*.tar", r"none-\*.tar cannot be read"),
        ("small.tar.gz", "small.tar.gz cannot be read .* not compressed"),
        ("flat.tar", r"flat.tar has 2 audio files .*, none with a label"),
    ],
)
def test_what_is_no_usable_tar_is_one_sentence(name, says, tmp_path):
    write_tar(tmp_path / "small.tar.gz", {"a/1.wav": wav(1)}, "w:gz")
    write_tar(tmp_path / "flat.tar", {"1.wav": wav(1), "2.wav": wav(2)})
    with pytest.raises(UsageError, match=says):
        speedkit.load_workload("audio", data_dir=tmp_path / name)
