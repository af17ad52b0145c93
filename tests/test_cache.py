"""The feature cache: the same features as live, and never stale."""

import dataclasses
import functools
import importlib.util
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cached import CPU, features, files_workload, live, load_file, opened, served, write

from speedkit.data import build, store
from speedkit.data.build import check_space
from speedkit.data.cache import open_cache
from speedkit.data.fingerprint import difference, fingerprint
from speedkit.data.loader import BatchStream
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import fit


@pytest.fixture
def workload(tmp_path):
    return files_workload(tmp_path / "data")


@pytest.fixture
def cache(tmp_path):
    return functools.partial(opened, folder=tmp_path / "cache")


# What is gathered.


@pytest.mark.parametrize("where", ["disk", "ram"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 5e-4)])  # 11 bits of precision
def test_gathered_rows_are_the_live_features(workload, cache, where, dtype, tolerance):
    indices = torch.tensor([7, 0, 19, 7])
    found = cache(workload, cache=where, cache_dtype=dtype)
    inputs, targets = found.gather(indices, CPU)
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, live(workload)[indices], rtol=tolerance, atol=0)
    assert targets.tolist() == [1, 0, 1, 1]
    assert found.where == where and found.why.startswith(f"cache={where}: 0.000")
    error = store.read(found.folder).manifest["max_error"]
    assert error == 0 if dtype == "float32" else 0 < error == (served(found) - live(workload)).abs().max()


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_entries_of_different_lengths_are_padded_with_zeros(tmp_path, cache, where):
    workload = files_workload(tmp_path / "data", varies=True)
    found = cache(workload, cache=where)
    inputs, lengths, targets = found.gather(torch.tensor([4, 0, 11]), CPU)
    assert inputs.shape == (3, 2, 12) and lengths.tolist() == [12, 8, 9] and targets.tolist() == [0, 0, 1]
    for row, index in enumerate((4, 0, 11)):
        expected = workload.features(workload.load(workload.train[index]))
        assert torch.equal(inputs[row, :, : lengths[row]], expected)
        assert not inputs[row, :, lengths[row] :].any()


def test_the_devices_way_of_gathering_different_lengths_is_the_disks(tmp_path, cache):
    workload = files_workload(tmp_path / "data", varies=True)
    disk, ram = cache(workload), cache(workload, cache="ram")
    ram.where = "device"  # the same indices, on whatever device the values are
    some = torch.tensor([4, 0, 11, 4])
    assert all(torch.equal(a, b) for a, b in zip(disk.gather(some, CPU), ram.gather(some, CPU), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to keep entries on")
@pytest.mark.parametrize("varies", [False, True])
def test_entries_on_a_gpu_are_those_on_disk(tmp_path, varies):
    workload, device = files_workload(tmp_path / "data", varies=varies), torch.device("cuda")
    places = [
        open_cache(workload, workload.train, Plan(cache=place), device=device, cache_dir=tmp_path / "cache")
        for place in ("device", "ram", "disk")
    ]
    assert [found.where for found in places] == ["device", "ram", "disk"]
    batches = [found.gather(torch.tensor([3, 1, 19]), device) for found in places]
    assert all(tensor.device.type == "cuda" for batch in batches for tensor in batch)
    for batch in batches[1:]:
        assert all(torch.equal(a, b) for a, b in zip(batches[0], batch, strict=True))


def test_waveforms_are_kept_as_16_bits(workload, cache):
    for item in workload.train:  # what a 16-bit file holds
        (np.fromfile(item.path, np.float32) * 32768).round().astype(np.float32).__truediv__(32768).tofile(item.path)
    found = cache(workload, cache_of="waveform")
    assert found.bytes == 20 * 8 * 2
    assert torch.equal(served(found), torch.stack([load_file(item) for item in workload.train]))


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_changing_a_gathered_batch_changes_no_cached_row(workload, cache, where):
    found = cache(workload, cache=where)
    inputs, targets = found.gather(torch.arange(20), CPU)
    inputs.zero_(), targets.zero_()
    assert torch.equal(served(found), live(workload))
    assert found.gather(torch.arange(20), CPU)[1].sum() == 10


def test_cached_batches_are_the_loaders_in_the_loaders_order(workload, cache):
    def stream(found):
        batches = BatchStream(workload, workload.train, Plan(), batch_size=8, seed=3, device=CPU, cache=found)
        return [next(batches) for _ in range(7)]

    for mine, theirs in zip(stream(cache(workload)), stream(None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_training_from_a_cache_is_training_without_one(workload, tmp_path):
    def losses(where):
        plan = Plan(cache=where, log_every=1)
        return fit(workload, plan=plan, device="cpu", progress=False, cache_dir=tmp_path / "cache").loss

    assert losses("off") == losses("ram") == losses("ram") == losses("disk")


def test_a_cache_travels_to_another_process(workload, cache):
    found = cache(workload)
    served(found)
    assert torch.equal(served(pickle.loads(pickle.dumps(found))), live(workload))


def test_mapped_shards_hold_no_file_open(workload, cache, monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 32)  # one entry
    found = cache(workload)
    assert len(found.files) == 20
    before = len(os.listdir("/proc/self/fd"))
    assert torch.equal(served(found), live(workload))
    assert len(os.listdir("/proc/self/fd")) == before
    for _ in range(2):
        assert torch.equal(served(found), live(workload))


def test_what_does_not_fit_into_memory_stays_on_disk(workload, cache, monkeypatch):
    monkeypatch.setattr("speedkit.data.entries.MEMORY_SHARE", 0.0)
    found = cache(workload, cache="ram")
    assert found.where == "disk" and "more than half" in found.why and "free in ram" in found.why


# What cannot be used.


def test_unreadable_items_are_named_and_never_gathered(workload, cache):
    missing = workload.train[4].path
    Path(missing).unlink()
    for _ in range(2):  # built, then found
        found = cache(workload)
        assert found.bad == {missing: "it is missing"}
        inputs, targets = found.gather(torch.tensor([3, 4, 5]), CPU)
        assert torch.equal(inputs, live(workload, [workload.train[3], workload.train[5]]))
        assert targets.tolist() == [1, 1]
    write(missing)
    found = cache(workload)
    assert found.bad == {} and found.changed == "1 changed: building 1 of 20 entries"
    assert torch.equal(served(found), live(workload))


@pytest.mark.parametrize(
    ("value", "dtype", "why"),
    [
        (np.nan, "float32", "NaN or infinity"),
        (-np.inf, "float32", "NaN or infinity"),
        (1e5, "float16", "beyond float16"),
    ],
)
def test_features_that_cannot_be_kept_are_left_out(workload, cache, value, dtype, why):
    path = workload.train[3].path
    np.array([0, value, *range(6)], np.float32).tofile(path)
    found = cache(workload, cache_dtype=dtype)
    assert why in found.bad[path] and len(served(found)) == 19
    assert store.read(found.folder).manifest["unusable"] == 1


def test_a_list_without_a_readable_item_is_an_error(workload, cache):
    for item in workload.train:
        Path(item.path).unlink()
    with pytest.raises(SpeedkitError, match=r"none of the 20 files of points can be read; .*it is missing"):
        cache(workload)


def test_different_lengths_need_the_workload_to_say_so(tmp_path, cache):
    workload = dataclasses.replace(files_workload(tmp_path / "data", varies=True), length=None)
    with pytest.raises(SpeedkitError, match=r"has features of shape \[2, \d+\], others have .*`length` must tell"):
        cache(workload)


def test_a_transform_that_fails_is_not_hidden(workload, cache):
    def failing(waveform):
        raise ValueError("a bug in the features")

    with pytest.raises(ValueError, match="a bug"):
        cache(dataclasses.replace(workload, features=failing))


def test_an_error_of_the_files_that_are_read_is_not_taken_for_one_of_the_cache(workload, cache):
    def unready(item):
        raise FileNotFoundError(2, "No such file or directory", item.path)

    with pytest.raises(FileNotFoundError):
        cache(dataclasses.replace(workload, load=unready))


def test_a_cache_that_does_not_fit_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(SpeedkitError, match=r"needs 4\.0 GB and .* has 3\.0 GB free: .*--cache-dir"):
        check_space(4_000_000_000, 3_000_000_000, tmp_path)
    check_space(4_000_000_000, 5_000_000_000, tmp_path)


def test_a_folder_that_cannot_be_made_is_named(workload, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpeedkitError, match=r"cannot be written to .*/file/cache.*--cache-dir"):
        opened(workload, tmp_path / "file" / "cache")


# What is built again, and what is not.


@pytest.fixture
def counted(workload):
    """The workload, and the list of the paths that were loaded."""
    loaded = []

    def load(item):
        loaded.append(item.path)
        return load_file(item)

    return dataclasses.replace(workload, load=load, sources=(load_file,)), loaded


def rebuilt(counted, cache, monkeypatch, **changes):
    """Build, forget, apply changes, open again: (paths that were loaded, what the cache says, what it serves)."""
    workload, loaded = counted
    monkeypatch.setattr(build, "PILOT", 1)
    loaded.clear()
    found = cache(dataclasses.replace(workload, **changes))
    return sorted({Path(path).stem for path in loaded}), found.changed, found


def test_the_second_time_nothing_is_computed(workload, cache):
    first = cache(workload)
    before = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    found = cache(workload)
    assert found.changed == "" and found.build_s == first.build_s
    assert before == {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    assert torch.equal(served(found), live(workload))


def test_a_changed_file_alone_is_read_again(counted, cache, monkeypatch, tmp_path):
    cache(counted[0])
    path = Path(counted[0].train[5].path)
    modified_ns = path.stat().st_mtime_ns
    write(path)
    os.utime(path, ns=(0, modified_ns + 1))
    again, said, found = rebuilt(counted, cache, monkeypatch)
    assert again == ["005"] and said == "1 changed: building 1 of 20 entries"
    assert torch.equal(served(found), live(counted[0]))
    write(path, 9)  # another size behind the old time
    os.utime(path, ns=(0, modified_ns + 1))
    with pytest.raises(SpeedkitError, match="shape"):
        cache(counted[0])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_added_and_removed_items_leave_the_others_alone(counted, cache, monkeypatch, tmp_path):
    workload, loaded = counted
    cache(workload, items=workload.train[:15])
    assert rebuilt(counted, cache, monkeypatch)[0] == ["015", "016", "017", "018", "019"]
    loaded.clear()
    found = cache(workload, items=workload.train[3:7][::-1])
    assert loaded == [] and found.changed == ""
    assert torch.equal(served(found), live(workload, workload.train[3:7][::-1]))


def test_one_folder_serves_training_and_test_items(workload, cache, tmp_path):
    workload = dataclasses.replace(workload, train=workload.train[:12], test=workload.train[12:])
    assert cache(workload).folder == cache(workload, items=workload.test).folder
    assert torch.equal(served(cache(workload, items=workload.test)), live(workload, workload.test))


def test_labels_are_always_the_live_ones(workload, cache):
    cache(workload)
    items = [dataclasses.replace(item, label=5) for item in workload.train]
    found = cache(dataclasses.replace(workload, train=items), items=items)
    assert found.changed == "" and set(found.targets.tolist()) == {5}


def test_a_touched_file_is_told_from_a_changed_one_by_its_content(workload, tmp_path):
    def opened_again():
        return open_cache(workload, workload.train, Plan(cache="disk"), cache_dir=tmp_path / "c", hash_content=True)

    opened_again()
    touched, changed = (Path(workload.train[index].path) for index in (1, 2))
    touched.touch()
    write(changed)
    found = opened_again()
    assert found.changed == "1 changed: building 1 of 20 entries"
    assert torch.equal(served(found), live(workload))


def edited_module(path, text):
    """A module of this text, written to `path` and imported afresh."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRANSFORM = """
FACTOR = 2.0
TABLE = {"gain": (1, 2)}

def helper(waveform):
    return waveform * FACTOR

def transform(waveform):
    return helper(waveform) + TABLE["gain"][0]
"""


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (("waveform * FACTOR", "waveform * FACTOR + 1"), "code of transform.helper has changed"),
        (("FACTOR = 2.0", "FACTOR = 3.0"), "code of transform.helper has changed"),
        (("(1, 2)", "(3, 2)"), "code of transform.transform has changed"),
        (("    return waveform", '    """Help."""\n    # a comment\n    return waveform'), ""),
        (("\n\ndef helper", "\n\nOTHER = 1\n\n\n\ndef helper"), ""),
    ],
)
def test_the_code_that_counts_is_all_that_the_features_use(workload, tmp_path, edit, changed):
    def of(text):
        module = edited_module(tmp_path / "transform.py", text)
        return fingerprint(dataclasses.replace(workload, features=module.transform), load_file, "features")

    assert difference(of(TRANSFORM), of(TRANSFORM)) == ""
    assert difference(of(TRANSFORM), of(TRANSFORM.replace(*edit))) == changed


def test_the_fingerprint_changes_with_each_thing_that_all_entries_depend_on(workload):
    def of(cache_of="features", load=load_file, **changes):
        return str(fingerprint(dataclasses.replace(workload, **changes), load, cache_of))

    class Loud:
        def __init__(self, gain):
            self.gain = torch.tensor(gain)

        def __call__(self, waveform):
            return waveform * self.gain

    seen = [
        of(),
        of("waveform"),
        of(parameters={"gain": 3.0}),
        of(parameters={"gain": 2.0, "bands": 64}),
        of(features=functools.partial(features, gain=4.0)),
        of(features=lambda x: 3 * x),
        of(features=lambda x: 4 * x),
        of(features=Loud(1.0)),
        of(features=Loud(2.0)),
        of(features=torch.nn.Linear(8, 8)),
        of(load=functools.partial(load_file, decoder="other")),
        of(sources=(live,)),
    ]
    first, other, another = lambda x: x, lambda x: 5 * x, lambda x: 6 * x  # of one name
    seen += [of(load=first, features=other), of(load=first, features=another)]
    assert len(set(seen)) == len(seen)
    assert of(recipe=Recipe(batch_size=4, seed=9), margin=0.5, augment=print) == seen[0]
    assert of(features=Loud(1.0)) == seen[7]


def test_a_transform_that_cannot_be_seen_into_must_name_its_sources(workload, cache):
    opaque = functools.partial(features, gain=threading.Lock())
    with pytest.raises(SpeedkitError, match=r"cannot be seen.*name the functions they depend on in its `sources`"):
        cache(dataclasses.replace(workload, features=opaque))


def test_a_changed_parameter_builds_all_and_says_why(counted, cache, monkeypatch):
    cache(counted[0])
    louder = {"features": functools.partial(features, gain=4.0), "parameters": {"gain": 4.0}}
    again, said, found = rebuilt(counted, cache, monkeypatch, **louder)
    assert len(again) == 20 and "parameter gain was 2.0, is 4.0" in said and said.endswith("building all 20 entries")
    assert torch.equal(served(found), live(dataclasses.replace(counted[0], **louder)))
    assert len(store.shard_files(found.folder)) == len(found.files)


def test_what_is_left_of_removed_and_changed_items_goes_with_its_shard(workload, cache, monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 32)
    found = cache(workload)
    write(workload.train[0].path, 8)
    again = cache(workload)
    assert len(again.files) == 20 and not (found.folder / "shard-0001-00000000.safetensors").exists()


def test_shards_built_by_several_processes_are_those_built_by_one(workload, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 3 * 32)
    alone = opened(workload, tmp_path / "alone")
    monkeypatch.setattr(build, "PARALLEL_S", 0.0)
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    together = opened(workload, tmp_path / "together")
    for path in store.shard_files(alone.folder):
        assert (together.folder / path.name).read_bytes() == path.read_bytes()
