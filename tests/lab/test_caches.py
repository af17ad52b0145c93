"""What the command `cache` sees of a cache: its damage, wherever it is, and none after a repair and the next use."""

import dataclasses
import os
import shutil

import pytest
from tiny import points

from speedkit.data.cache import build_cache
from speedkit.data.cache_files import HEADER
from speedkit.lab.caches import build_joined, build_on_cluster, build_part, caches_in, damage, describe
from speedkit.plan import Plan


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)


def remove(path, _):
    path.unlink()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an entry in .* is not as it was written")
@pytest.mark.parametrize("name", ["index.bin", "values.bin"])
@pytest.mark.parametrize(("kind", "every"), [(flip, 1), (os.truncate, 1), (remove, 1000)])  # a file is removed once
def test_damage_is_found_wherever_it_is_and_repaired(tmp_path, kind, every, name):
    workload, plan = points(), Plan(cache="disk")
    items = workload.train[:3]

    def built(folder):
        return build_cache(workload, items, plan, cache_dir=tmp_path / folder, workers=0)

    folder = built("whole").folder
    whole = (folder / name).read_bytes()
    assert damage(folder) == []
    for place in range(0, len(whole), every):
        copy = tmp_path / "copy" / folder.name
        shutil.copytree(folder, copy)
        kind(copy / name, place)
        assert caches_in(copy.parent) == [copy] and describe(copy)
        assert damage(copy, repair=True), f"at {place}"
        assert built("copy").built and damage(copy) == [] and (copy / name).read_bytes() == whole, f"at {place}"
        shutil.rmtree(copy)


# ---- built in parts ----

PLAN = Plan(cache="disk")


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def alone(workload, tmp_path):
    return files_of(build_cache(workload, workload.train, PLAN, cache_dir=tmp_path / "alone").folder)


HARM = {  # to one of two parts of 16 and 17 items, and how many of its entries are computed again
    "none": (lambda folder: None, 0),
    "index": (lambda folder: flip(folder / "index.bin", 100), 16),
    "one entry": (lambda folder: flip(folder / "values.bin", 5), 1),
    "no values": (lambda folder: os.truncate(folder / "values.bin", 0), 16),
    "no entry yet": (lambda folder: os.truncate(folder / "index.bin", HEADER.itemsize), 16),
}


@pytest.mark.parametrize("harm", HARM)
def test_parts_are_joined_to_the_bytes_of_one_build(tmp_path, harm):
    """One of the three was never built, and another may be damaged: what is not whole is computed."""
    damage_to, computed = HARM[harm]
    workload = points(train=50)
    parts = [build_part(workload, workload.train, PLAN, folder=tmp_path / "parts", part=(k, 3)) for k in (1, 3)]
    assert [len(part.items) for part in parts] == [16, 17]
    damage_to(parts[0].folder)
    joined = build_joined(workload, workload.train, PLAN, folder=tmp_path / "parts")
    assert joined.built == 17 + computed and files_of(joined.folder) == alone(workload, tmp_path)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [joined.folder.name]  # the parts are gone


@pytest.mark.slow
def test_a_cluster_builds_the_bytes_of_one_build_though_a_worker_dies(tmp_path):
    distributed = pytest.importorskip("distributed")
    workload = points(train=int(os.environ.get("CLUSTER_ITEMS", "2000")))
    fatal = workload.train[len(workload.train) // 3]
    load = workload.load
    died = tmp_path / "died"

    def dies_once(item):
        if item == fatal and not died.exists():
            died.touch()
            os.kill(os.getpid(), 9)
        return load(item)

    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        dying = dataclasses.replace(workload, load=dies_once)
        options = {"folder": tmp_path / "built", "address": cluster.scheduler_address}
        built = build_on_cluster(dying, workload.train, PLAN, **options)
    assert died.exists() and built.built == 0  # by the join
    assert files_of(built.folder) == alone(dying, tmp_path)
