"""The feature cache when things go wrong: killed builds, damaged files, full disks, two builders, read-only folders."""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from cached import CPU, content, files_workload, live, load_file, opened, served

from speedkit.cli import commands
from speedkit.data import build, store
from speedkit.data.build import repair, verify
from speedkit.data.cache import builder_of
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small or read-only file system takes root")


def forked(work, *arguments):
    """Start a process, of a group of its own, that calls `work`; return its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        work(*arguments)
        code = 0
    finally:
        os._exit(code)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def workload(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 5 * 32)  # five entries
    monkeypatch.setattr(build, "SHARDS", 1)
    return files_workload(tmp_path / "data")


def shards(folder):
    """Name -> bytes of what a build writes, but for the times in the manifest and the log."""
    return {name: data for name, data in content(folder).items() if name.endswith(".safetensors")}


def repairing(workload, folder, **plan):
    """What repairs the cache of a workload in `folder`."""
    return builder_of(workload, workload.train, Plan(cache="disk", **plan), folder)


# Interrupted and concurrent builds.


def slow_load(item):
    time.sleep(0.002)
    return load_file(item)


@pytest.fixture
def many(tmp_path, monkeypatch, workload):
    """A hundred items, in shards of five, that two processes take about 0.1 s to build."""
    monkeypatch.setattr(build, "PARALLEL_S", 0.0)
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    return dataclasses.replace(files_workload(tmp_path / "data", 100), load=slow_load)


def killed_builds(workload, root, times):
    """Kill a build (alone, or with its processes) again and again, at random moments; yield what it had done by then.

    Each time what follows must end with the same bytes, and compute nothing that was there.
    """
    rng, began_s = random.Random(0), time.monotonic()
    assert ended(forked(opened, workload, root / "whole")) == 0
    took_s = time.monotonic() - began_s
    [whole] = (root / "whole").iterdir()
    for number in range(times):
        child = forked(opened, workload, root / str(number))
        time.sleep(rng.uniform(0.1, 0.9) * took_s)
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number % 2 else os.kill)(child, signal.SIGKILL)
        ended(child)
        done = len(list(root.glob(f"{number}/*/shard-*")))
        found = opened(workload, root / str(number))
        left = 100 - 5 * done
        assert found.changed in ("", "building all 100 entries", f"{left} added: building {left} of 100 entries")
        assert shards(found.folder) == shards(whole)
        assert verify(found.folder) == []
        yield done


def test_a_killed_build_goes_on_and_comes_out_the_same(many, tmp_path):
    assert len(list(killed_builds(many, tmp_path, 2))) == 2


@pytest.mark.slow
def test_builds_killed_at_random_moments_come_out_the_same(many, tmp_path):
    done = list(killed_builds(many, tmp_path, 20))
    assert any(0 < count < 20 for count in done), f"no build was killed half way: {done}"


def test_two_builders_at_once_share_the_work_of_one(many, tmp_path):
    children = [forked(opened, many, tmp_path / "cache") for _ in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    [folder] = (tmp_path / "cache").iterdir()
    assert verify(folder) == [] and len(store.shard_files(folder)) == 20
    assert torch.equal(served(opened(many, tmp_path / "cache")), live(many))


# Places that cannot be written.


@contextlib.contextmanager
def mounted(folder, size):
    """A small file system in memory at `folder`."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@ROOT_ONLY
@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_ends_the_build_and_is_gone_on_from(tmp_path, workload, processes, monkeypatch):
    if processes > 1:
        monkeypatch.setattr(build, "PARALLEL_S", 0.0)
        monkeypatch.setattr(build, "usable_cores", lambda: processes)
    with mounted(tmp_path / "small", "256k") as folder:
        filler, armed, load = folder / "filler", tmp_path / "armed", workload.load
        armed.touch()

        def filling(item):
            if item.path.endswith("012.raw") and armed.exists():
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
                    while True:
                        stream.write(bytes(4096))
            return load(item)

        monkeypatch.setattr(build, "PILOT", 1)
        workload = dataclasses.replace(workload, load=filling, sources=(load,))
        with pytest.raises(SpeedkitError, match=r"No space left on device.*what is complete is kept.*--cache-dir"):
            opened(workload, folder / "cache")
        [cache] = (folder / "cache").iterdir()
        kept = content(cache)
        assert 1 <= len(store.shard_files(cache)) < 4 and not list(cache.glob(".*.tmp"))
        filler.unlink()
        armed.unlink()
        found = opened(workload, folder / "cache")
        assert all(shards(cache)[path] == data for path, data in kept.items() if path.startswith("shard"))
        assert torch.equal(served(found), live(workload))
        del found


@ROOT_ONLY
def test_a_read_only_folder_serves_what_it_holds_and_says_what_it_lacks(tmp_path, workload):
    with mounted(tmp_path / "cache", "1m") as folder:
        opened(workload, folder, items=workload.train[:15])
        assert subprocess.run(["mount", "-o", "remount,ro", folder], capture_output=True).returncode == 0
        found = opened(workload, folder, items=workload.train[:15])
        assert torch.equal(served(found), live(workload, workload.train[:15]))
        with pytest.raises(SpeedkitError, match=r"cannot be written to .*Read-only file system"):
            opened(workload, folder)
        del found


# Damage.


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def damage(folder, kind, rng):
    """Damage a file of a cache; return which."""
    files = store.shard_files(folder)
    path = rng.choice(files)
    if kind == "flipped bit":
        flip(path, rng)
    elif kind == "truncated":
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        other = rng.choice([file for file in files if file != path])
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        path = folder / {"manifest": store.MANIFEST, "index": store.INDEX, "log": store.LOG}[kind]
        rng.choice(
            [
                flip,
                lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
                lambda path, _: path.unlink(),
            ]
        )(path, rng)
    return path


KINDS = ("flipped bit", "truncated", "missing", "swapped", "manifest", "index", "log")


def damaged_and_mended(workload, root, kinds, seed):
    """Damage a cache again and again; each time it must be found, never served, and repaired to the same bytes."""
    expected = live(workload)
    folder = opened(workload, root).folder
    before = content(folder)
    rng = random.Random(seed)
    for kind in kinds:
        path = damage(folder, kind, rng)
        if content(folder) == before:  # the bits that were flipped were no part of any file
            continue
        assert verify(folder), f"{kind} of {path.name} was not found"
        copy = root.parent / "copy"
        shutil.copytree(folder, copy / folder.name)
        found = opened(workload, copy)
        assert torch.equal(served(found), expected), f"{kind} of {path.name} was served"
        assert torch.equal(served(opened(workload, copy, cache="ram")), expected)
        shutil.rmtree(copy)
        repair(repairing(workload, root))
        assert content(folder) == before, f"{kind} of {path.name} was not mended"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_never_served_and_mended(tmp_path, workload, kind):
    damaged_and_mended(workload, tmp_path / "cache", [kind] * 3, seed=KINDS.index(kind))


@pytest.mark.slow
def test_two_hundred_corruptions(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 15 * 32)
    monkeypatch.setattr(build, "SHARDS", 1)
    workload = files_workload(tmp_path / "data", 60)
    kinds = [KINDS[min(number % 10, 6)] if number % 10 > 3 else "flipped bit" for number in range(200)]
    damaged_and_mended(workload, tmp_path / "cache", kinds, seed=3)


def test_damaged_entries_are_computed_live_counted_and_reported_once(tmp_path, workload, capsys):
    found = opened(workload, tmp_path / "cache")
    shard = store.shard_files(found.folder)[1]
    data = bytearray(shard.read_bytes())
    begin = store.read_shard(shard).begin
    for entry in (0, 3):
        data[begin + entry * 32] ^= 1
    shard.write_bytes(data)
    found = opened(workload, tmp_path / "cache")
    for _ in range(2):
        assert torch.equal(served(found), live(workload))
    assert found.recomputed == 2
    assert capsys.readouterr().err.count("is not as it was written") == 1
    assert [name for name, _ in verify(found.folder)] == ["005.raw", "008.raw"]
    assert repair(repairing(workload, tmp_path / "cache")) == 2
    assert verify(found.folder) == []


def test_a_shard_cut_short_while_it_is_read_from_does_not_end_the_process(tmp_path, workload):
    found = opened(workload, tmp_path / "cache")
    found.gather(torch.tensor([0]), CPU)
    for shard in store.shard_files(found.folder):
        os.truncate(shard, 100)
    found.looked_s = 0.0  # a second has passed: lengths are looked at once in one
    assert torch.equal(served(found), live(workload))
    assert found.recomputed == 20


def test_a_damaged_entry_whose_file_is_gone_is_left_out_and_named(tmp_path, workload):
    found = opened(workload, tmp_path / "cache")
    shard = store.shard_files(found.folder)[0]
    with shard.open("rb+") as stream:
        stream.seek(store.read_shard(shard).begin + 2 * 32)
        stream.write(b"damage")
    Path(workload.train[2].path).unlink()
    assert len(served(found)) == 19
    assert found.bad == {workload.train[2].path: "it is missing"}


def test_memory_stays_flat_over_twenty_epochs(tmp_path, workload):
    found = opened(workload, tmp_path / "cache")
    sizes = []
    for _ in range(20):
        for _ in range(200):
            found.gather(torch.randperm(20), CPU)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert sizes[-1] - sizes[1] < 1_000_000


# The commands.


def speedkit(*arguments):
    return commands.main(["cache", *map(str, arguments)], standalone_mode=False)


def test_the_commands_build_describe_verify_and_repair(tmp_path, capsys):
    root = tmp_path / "cache"
    data = ["--clips", "30", "--size", "tiny"]
    speedkit("build", root, *data)
    speedkit("build", root, *data)
    assert "building all 30 entries" in (said := capsys.readouterr().out) and "all entries are there" in said
    assert not speedkit("verify", root)
    [folder] = root.iterdir()
    before = content(folder)
    shard = store.shard_files(folder)[0]
    flipped = bytearray(before[shard.name])
    flipped[store.read_shard(shard).begin] ^= 1
    shard.write_bytes(flipped)
    assert speedkit("verify", root) == 1
    assert "do not match their checksum" in capsys.readouterr().out
    speedkit("repair", root)  # the cache itself says how its workload is made
    assert "1 entries computed again" in capsys.readouterr().out
    assert content(folder) == before
    speedkit("info", root)
    assert "30 entries of workload audio" in (said := capsys.readouterr().out) and "features as float32" in said


@pytest.mark.parametrize("command", ["info", "verify", "repair"])
def test_a_folder_without_a_cache_is_named(tmp_path, command):
    with pytest.raises(SpeedkitError, match=rf"{tmp_path.name} holds no feature cache: name the folder"):
        speedkit(command, tmp_path)
