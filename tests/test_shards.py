"""Tar shards: the same training as from single files, safe to read, and whole whatever interrupts their writing."""

import dataclasses
import io
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tiny
import torch
import webdataset

import speedkit
from speedkit import Plan
from speedkit.data.decode import BadItem, load_audio
from speedkit.data.shards import TarMember, members, pack, stream
from speedkit.errors import PlanError, SpeedkitError

RATE_HZ = 8000
SHARD_BYTES = 16_000  # four clips


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A folder of two classes, 20 clips each, in three formats."""
    root, rng = tmp_path_factory.mktemp("recordings"), np.random.default_rng(0)
    for index in range(40):
        path = root / ("low", "high")[index % 2] / f"clip {index // 2}.{('wav', 'flac', 'ogg')[index % 3]}"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, rng.uniform(-0.5, 0.5, 2400), RATE_HZ)
    return root


@pytest.fixture
def workload(recordings, tmp_path):
    """The audio workload on a copy of the recordings that the test may change."""
    return speedkit.load_workload("audio", data_dir=shutil.copytree(recordings, tmp_path / "data"), size="tiny")


def packed(workload, folder, shard_bytes=SHARD_BYTES):
    return pack(workload, workload.train, folder, shard_bytes)


def contents(folder):
    """Return the bytes of every finished tar below `folder`."""
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*.tar")}


def written_at(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).rglob("*.tar")}


def test_a_shard_holds_the_bytes_of_the_files_in_their_order(workload, tmp_path):
    items = packed(workload, tmp_path / "shards")
    assert len({item.path.tar for item in items}) > 3
    assert [item.path.read() for item in items] == [Path(item.path).read_bytes() for item in workload.train]
    assert [dataclasses.replace(item, path="") for item in items] == [
        dataclasses.replace(item, path="") for item in workload.train
    ]
    member = items[0].path
    assert member.name.endswith(Path(workload.train[0].path).suffix) and str(member) == f"{member.tar}/{member.name}"
    assert pickle.loads(pickle.dumps(member)) == member


@pytest.mark.parametrize("plan", [{}, {"workers": 2}, {"cache": "ram"}])
def test_training_from_shards_gives_the_losses_of_single_files_to_the_bit(workload, tmp_path, plan):
    recipe = dataclasses.replace(workload.recipe, batch_size=8, epochs=2)
    plan = Plan(log_every=1, **plan)
    files, shards = (
        speedkit.fit(workload, recipe, dataclasses.replace(plan, shards=packed), cache_dir=tmp_path, progress=False)
        for packed in (False, True)
    )
    assert files.loss == shards.loss and files.evaluation == shards.evaluation
    assert contents(tmp_path)


@pytest.mark.parametrize("decoder", ["soundfile", "torchcodec", "librosa"])
def test_every_decoder_reads_a_member_as_it_reads_the_file(workload, tmp_path, decoder):
    if decoder != "soundfile" and not speedkit.this_machine("cpu").supports(decoder):
        pytest.skip(speedkit.this_machine("cpu").why_not(decoder))
    for item, there in list(zip(workload.train, packed(workload, tmp_path / "shards"), strict=True))[:6]:
        expected = load_audio(item.path, RATE_HZ, 2000, decoder)
        assert torch.equal(load_audio(there.path, RATE_HZ, 2000, decoder), expected)


def test_what_is_there_is_used_again_and_only_a_changed_file_s_shard_is_written(workload, tmp_path):
    first, before = packed(workload, tmp_path / "shards"), written_at(tmp_path / "shards")
    assert packed(workload, tmp_path / "shards") == first and written_at(tmp_path / "shards") == before

    soundfile.write(workload.train[0].path, np.zeros(2400), RATE_HZ)
    changed = packed(workload, tmp_path / "shards")
    after = written_at(tmp_path / "shards")
    assert {name for name in before if after[name] != before[name]} == {Path(changed[0].path.tar).name}
    assert torch.equal(workload.load(changed[0]), workload.load(workload.train[0]))


def test_the_same_files_give_the_same_bytes(workload, tmp_path):
    packed(workload, tmp_path / "one")
    packed(workload, tmp_path / "other")
    assert contents(tmp_path / "one") == contents(tmp_path / "other") != {}


def test_a_damaged_index_or_tar_is_written_again(workload, tmp_path):
    items, good = packed(workload, tmp_path / "shards"), contents(tmp_path / "shards")
    index, tar = Path(items[0].path.tar).with_suffix(".json"), Path(items[-1].path.tar)
    index.write_text(index.read_text()[:50])
    tar.write_bytes(tar.read_bytes()[:-1000])
    packed(workload, tmp_path / "shards")
    assert contents(tmp_path / "shards") == good


def test_a_tar_that_was_written_anew_or_is_gone_is_a_bad_item_and_not_other_bytes(workload, tmp_path):
    items = packed(workload, tmp_path / "shards")
    tar = Path(items[0].path.tar)
    os.utime(tar, ns=(1, 1))
    with pytest.raises(BadItem, match="written anew") as caught:
        workload.load(items[0])
    assert caught.value.path == str(items[0].path)
    Path(items[-1].path.tar).unlink()
    with pytest.raises(BadItem, match="no such file"):
        workload.load(items[-1])


def test_a_missing_file_stays_what_it_was_and_a_broken_one_is_quarantined_under_its_name(workload, tmp_path):
    Path(workload.train[3].path).unlink()
    Path(workload.train[5].path).write_bytes(b"not audio")
    items = packed(workload, tmp_path / "shards")
    assert items[3] is workload.train[3]
    with pytest.raises(BadItem, match="cannot be decoded") as caught:
        workload.load(items[5])
    assert Path(workload.train[5].path).stem.replace(" ", "_") in caught.value.path


def test_a_workload_that_cannot_read_from_tars_says_so(workload, tmp_path):
    points = tiny.points()
    with pytest.raises(PlanError, match="shards=True needs items that are files"):
        pack(points, points.train, tmp_path)
    by_path = dataclasses.replace(workload, load=lambda item: torch.from_numpy(soundfile.read(item.path)[0]))
    with pytest.raises(PlanError, match="shards=False"):
        packed(by_path, tmp_path)


def test_writing_that_fails_says_why_and_leaves_nothing_half(workload, tmp_path):
    packed(workload, tmp_path / "reference", 10**6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))  # as a full disk would: writing on is an error
    try:
        with pytest.raises(SpeedkitError, match=r"shards cannot be written to .*File too large.*finished ones"):
            packed(workload, tmp_path / "shards", 10**6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not contents(tmp_path / "shards") and not list((tmp_path / "shards").rglob("*.tmp"))
    packed(workload, tmp_path / "shards", 10**6)
    assert contents(tmp_path / "shards") == contents(tmp_path / "reference")
    (tmp_path / "file").touch()
    with pytest.raises(SpeedkitError, match="cannot be written"):
        packed(workload, tmp_path / "file")


PACK = f"""
import sys, speedkit
from speedkit.data.shards import pack
workload = speedkit.load_workload("audio", data_dir=sys.argv[1], size="tiny")
print("ready", flush=True)
pack(workload, workload.train * 40, sys.argv[2], {SHARD_BYTES})
"""


@pytest.mark.slow
def test_a_kill_leaves_whole_shards_only_and_two_writers_at_once_finish_the_same(workload, tmp_path):
    def start(folder):
        command = [sys.executable, "-c", PACK, tmp_path / "data", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout.readline() == b"ready\n"
        return process

    assert start(tmp_path / "reference").wait() == 0
    reference = contents(tmp_path / "reference")
    killed_at = []
    for wanted in (1, len(reference) // 3, 2 * len(reference) // 3):
        process = start(tmp_path / "shards")
        while process.poll() is None and len(contents(tmp_path / "shards")) < wanted:
            pass
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found = contents(tmp_path / "shards")
        killed_at.append(len(found))
        assert all(reference[name] == held for name, held in found.items())
    assert killed_at[0] < len(reference)
    kept = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*.json")}
    both = [start(tmp_path / "shards") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert contents(tmp_path / "shards") == reference and not list((tmp_path / "shards").rglob("*.tmp"))
    now = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "shards").rglob("*.json")}
    assert {name: now[name] for name in kept} == kept, "what was finished before the kill is used again"


# ---- tars that others wrote ----


def tar_of(path, *names, data=b"sound", **fields):
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(info, field, value)
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (["good.wav", "../outside.wav"], {}),
        (["sub/../../outside.wav"], {}),
        (["/outside.wav"], {}),
        (["twice.wav", "twice.wav"], {}),
        (["link.wav"], {"type": tarfile.SYMTYPE, "linkname": "/outside.wav"}),
        (["link.wav"], {"type": tarfile.LNKTYPE, "linkname": "../outside.wav"}),
        (["device.wav"], {"type": tarfile.CHRTYPE}),
        (["pipe.wav"], {"type": tarfile.FIFOTYPE}),
    ],
)
def test_an_unsafe_tar_is_refused_and_nothing_leaves_it(tmp_path, names, fields):
    inside = tmp_path / "inside"
    inside.mkdir()
    tar = tar_of(inside / "foreign.tar", *names, **fields)
    with pytest.raises(SpeedkitError, match=r"foreign.tar is refused"):
        members(tar)
    with pytest.raises(SpeedkitError, match=r"foreign.tar is refused"):
        next(stream([tar]))
    assert Counter(path.name for path in tmp_path.rglob("*")) == {"inside": 1, "foreign.tar": 1}


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, None])
def test_what_is_no_tar_is_one_sentence(tmp_path, data):
    path = tmp_path / "broken.tar"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(SpeedkitError, match="cannot be read as an uncompressed tar"):
        members(path)


def test_members_of_a_foreign_tar_are_read_at_random(tmp_path):
    with tarfile.open(tmp_path / "foreign.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for index in range(5):
            info = tarfile.TarInfo(f"a folder/{'ü' * 80} {index}.wav")  # a long name takes further headers
            info.size = 1000 + index
            tar.addfile(info, io.BytesIO(bytes([index]) * info.size))
    found = members(tmp_path / "foreign.tar")
    assert [member.read() for member in found[::-1]] == [bytes([index]) * (1000 + index) for index in (4, 3, 2, 1, 0)]


def test_the_stream_gives_the_clips_in_order_or_shuffled(workload, tmp_path):
    items = packed(workload, tmp_path / "shards")
    tars = sorted({item.path.tar for item in items})
    expected = [(item.path.read(), item.label) for item in items]
    assert list(stream(tars)) == expected
    shuffled = list(stream(tars, shuffle=16, seed=1))
    assert shuffled != expected and sorted(shuffled) == sorted(expected)
    assert shuffled == list(stream(tars, shuffle=16, seed=1)) != list(stream(tars, shuffle=16, seed=2))


def test_the_stream_reads_what_webdataset_wrote_and_refuses_what_has_no_class(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "good.tar")) as writer:
        writer.write({"__key__": "one", "flac": b"sound", "cls": 7})
    assert list(stream([tmp_path / "good.tar"])) == [(b"sound", 7)]
    with pytest.raises(SpeedkitError, match=r"clip one of .*bad.tar is not one file and a number"):
        list(stream([tar_of(tmp_path / "bad.tar", "one.flac")]))


def test_a_member_cut_short_is_an_error(tmp_path):
    tar = tar_of(tmp_path / "a.tar", "one.wav")
    member = members(tar)[0]
    beyond = TarMember(member.tar, member.offset, 10**6, member.name, member.status)
    with pytest.raises(BadItem, match="of 1000000 bytes are there"):
        load_audio(beyond, RATE_HZ, 100)
