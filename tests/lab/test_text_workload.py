"""The text workload: its data, what is hidden of it, a net that looks both ways, a loss that bounds bits per byte."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import CPU, H100

from speedkit.data.batch import Batch, tensors_of
from speedkit.data.cache import open_cache
from speedkit.data.loader import BatchStream
from speedkit.fallbacks import resolve
from speedkit.lab.workloads.text import BYTES, MASK, SIZES, TextNet, augment, loss, text
from speedkit.plan import Plan


@pytest.fixture
def net():
    torch.manual_seed(0)
    return TextNet(SIZES["tiny"])


def some_windows(count=6):
    return torch.randint(BYTES, (count, 64), generator=torch.Generator().manual_seed(0)).byte()


def test_windows_are_cut_from_the_text_and_need_no_cache(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 700)
    mine = text(tmp_path, test_pattern=r"b\.txt$", clips=5, size=SIZES["tiny"])
    assert (len(mine.train), len(mine.test)) == (5, 10)
    assert torch.stack([mine.load(item) for item in mine.test]).unique().tolist() == [ord("b")]
    asked = Plan(cache="disk", features_on="device", workers=2)
    effective = resolve(asked, CPU, workload=mine)
    assert {fallback.field for fallback in effective.fallbacks} == {"cache", "features_on"}
    assert effective.plan == Plan(workers=2) and "memory" in effective.fallbacks[0].why


def test_windows_on_the_device_are_gathered_there_into_the_same_batches():
    mine, plan, cpu = text(size=SIZES["tiny"], clips=40), Plan(cache="device"), torch.device("cpu")
    assert resolve(plan, H100, workload=mine).fallbacks == ()
    assert resolve(plan, CPU, workload=mine).plan.cache == "off"
    for items, seed in ((mine.train, 0), (mine.test, None)):
        cache = open_cache(mine, items, plan, device=cpu)
        assert cache.where == "device" and cache.why == f"cache=device: {64e-6 * len(items):.3g} MB"
        live, kept = (
            BatchStream(mine, items, each, batch_size=6, seed=seed, device=cpu, cache=rows)
            for each, rows in ((Plan(), None), (plan, cache))
        )
        for _ in range(2 * len(live)):
            for one, other in zip(tensors_of(next(live)), tensors_of(next(kept)), strict=True):
                assert torch.equal(one.float(), other.float())
    stream = BatchStream(mine, mine.train, plan, batch_size=6, seed=0, device=cpu, cache=cache)
    stream.device = torch.device("meta")  # which holds no numbers, and needs no GPU
    cache.entries, cache.labels = cache.entries.to("meta"), {"targets": cache.labels["targets"].to("meta")}
    batches = [next(stream) for _ in range(3)]
    assert all(tensor.is_meta for batch in batches for tensor in tensors_of(batch)), "nothing is copied from the host"


def test_augment_hides_a_uniform_number_of_bytes_anywhere_in_a_window():
    batch, generator = Batch(some_windows(50), None), torch.Generator()
    shown = torch.stack([augment(batch, generator.manual_seed(seed)).inputs for seed in range(64)])
    hidden = shown == MASK  # [seeds, windows, bytes]
    assert torch.equal(shown[~hidden], batch.inputs.expand(64, -1, -1)[~hidden].long())
    counts = hidden.sum(dim=2)
    times = torch.bincount(counts.flatten(), minlength=65)
    assert times[0] == 0 and times[1:].min() > 20 and times[1:].max() < 80  # 50 are expected
    assert (hidden.float().mean(dim=(0, 1)) - 0.5).abs().max() < 0.05
    assert counts.sort(dim=1).values.diff(dim=1).max() <= 2, "within a batch the numbers are spread evenly"


def test_evaluation_hides_by_the_number_of_a_window_whatever_the_batch(net):
    shown = []
    net.register_forward_pre_hook(lambda _, inputs: shown.append(inputs[0]))
    windows, numbers = some_windows(64), torch.arange(64)
    _, bits = loss(net, Batch(windows, numbers), None)
    parts = [loss(net, batch, None)[1] for batch in map(Batch, windows.split(5), numbers.split(5))]
    torch.testing.assert_close(torch.cat(parts), bits, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(shown[1:]), shown[0])
    assert (shown[0] == MASK).sum(dim=1).tolist() == list(range(1, 65)), "every share of a window, once each"


def test_a_window_s_score_is_the_mean_of_its_hidden_bytes_in_bits(net):
    windows = some_windows(4)
    shown = augment(Batch(windows, None), torch.Generator().manual_seed(0)).inputs
    _, bits = loss(net, Batch(shown, windows), None)
    nats = F.cross_entropy(net(shown).transpose(1, 2), windows.long(), reduction="none")
    hidden = shown == MASK
    torch.testing.assert_close(bits, (nats * hidden).sum(dim=1) / hidden.sum(dim=1) / math.log(2))
