"""The text workload: its data, what is hidden of it, a net that looks both ways, a loss that bounds bits per byte."""

import bisect
import dataclasses
import fractions
import heapq
import inspect
import math
import pickle
import tarfile
import typing
from pathlib import Path

import pytest
import torch
from tiny import emulating

from speedkit.errors import UsageError
from speedkit.plan import Plan, resolve
from speedkit.train.fit import fit
from speedkit.workloads import load_workload
from speedkit.workloads.text import (
    BYTES,
    MASK,
    SIZES,
    TextNet,
    augment,
    loss,
    rotate,
    score,
    text,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def library():
    return text(size="tiny")


def folder_of(root, **files):
    for name, content in files.items():
        (root / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def windows_of(workload, items):
    return torch.stack([workload.load(item) for item in items])


def some_windows(count=6, window=64, seed=0, device="cpu"):
    return torch.randint(BYTES, (count, window), generator=torch.Generator().manual_seed(seed)).byte().to(device)


# --- data


def test_library_windows_are_its_source_and_a_file_is_trained_on_whole_or_not_at_all(library):
    trained = windows_of(library, library.train).numpy().tobytes()
    sources = [Path(module.__file__).read_bytes() for module in (bisect, fractions, heapq, inspect, tarfile, typing)]
    whole = [source in trained for source in sources]
    assert whole == [source[len(source) // 2 :][:1000] in trained for source in sources] and sum(whole) >= 3
    assert len(library.train) > 10_000 and 128 <= len(library.test) <= 256
    tested = windows_of(library, library.test)
    assert torch.equal(windows_of(text(size="tiny"), library.test), tested)
    other = text(size="tiny", seed=1)
    assert not torch.equal(windows_of(other, other.test)[: len(tested)], tested[: len(other.test)])


def test_own_files_are_split_whole(tmp_path):
    mine = text(folder_of(tmp_path, **{f"{name}__txt": name * 640 for name in "abcdefghij"}), size="tiny")
    (tested,) = windows_of(mine, mine.test).unique().tolist()
    assert tested not in windows_of(mine, mine.train).unique()
    assert len(mine.train) == 90 and len(mine.test) == 10


def test_pattern_names_the_test_files_and_clips_count_the_windows_trained_on(tmp_path):
    folder_of(tmp_path, a__md="a" * 640, b__txt="b" * 128, c__md="c" * 640)
    mine = text(tmp_path, test_pattern=r"\.txt$", clips=5, size="tiny")
    assert windows_of(mine, mine.test).unique().tolist() == [ord("b")] and len(mine.train) == 5


def test_the_end_of_a_single_file_is_the_test_set(tmp_path):
    mine = text(folder_of(tmp_path, all__txt="a" * 5760 + "b" * 640), size="tiny")
    assert windows_of(mine, mine.test).unique().tolist() == [ord("b")] and len(mine.train) == 90


def test_what_is_no_text_is_left_out(tmp_path):
    folder_of(tmp_path, a__txt="a" * 640, b__txt="b" * 640, c__bin=b"GIF\0", d__txt="d")
    (tmp_path / "d.txt").unlink()
    (tmp_path / "d.txt").symlink_to(tmp_path / "gone")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("x")
    mine = text(tmp_path, size="tiny")
    assert {len(mine.train), len(mine.test)} == {10}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "huge"}, "size 'huge' is unknown.*tiny, small, medium"),
        ({"data_dir": "nowhere"}, "does not exist.*--data-dir"),
        ({"data_dir": "a.txt"}, "is not a folder"),
        ({"data_dir": "empty"}, "holds no text files"),
        ({"data_dir": "short"}, "there are 0 windows of 64 bytes"),
        ({"clips": 10**9}, "1000000000 asked for"),
        ({"test_pattern": "("}, "not a regular expression"),
        ({"test_pattern": "nothing like it"}, "matches 0 of "),
        ({"test_pattern": "."}, r"matches (\d+) of \1 files"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "short"):
        (tmp_path / name).mkdir()
    folder_of(tmp_path, a__txt="a")
    folder_of(tmp_path / "short", a__txt="a", b__txt="b")
    with pytest.raises(UsageError, match=sentence):
        text(**({"size": "tiny"} | options))
    for name, unknown in (("text", {"labels": "a.csv"}), ("image", {"max_duration_s": 3.0})):
        with pytest.raises(UsageError, match=rf"does not take an option.*{next(iter(unknown))}"):
            load_workload(name, **unknown)


def test_everything_a_worker_needs_pickles_and_plans_without_use_for_it_say_so(library):
    again = pickle.loads(pickle.dumps(library))
    assert torch.equal(again.load(again.test[3]), library.load(library.test[3]))
    asked = Plan(cache="disk", features_on="device", shards=True, workers=2)
    effective = resolve(asked, emulating("cpu"), workload=library)
    assert {found.field for found in effective.fallbacks} == {"cache", "features_on", "shards"}
    assert effective.plan == Plan(workers=2) and "memory" in effective.fallbacks[0].why


# --- what is hidden


@pytest.mark.parametrize("device", DEVICES)
def test_augment_hides_a_uniform_number_of_bytes_anywhere_in_a_window(device):
    windows, generator = some_windows(50, device=device), torch.Generator(device)
    counts, places = [], 0
    for seed in range(64):
        shown, clean = augment((windows, None), generator.manual_seed(seed))
        hidden = shown == MASK
        assert clean is windows and torch.equal(shown[~hidden], windows[~hidden].long())
        counts.append(hidden.sum(dim=1).cpu())
        places += hidden.sum(dim=0).cpu()
    each = torch.bincount(torch.cat(counts), minlength=65)
    assert each[0] == 0 and each[1:].min() > 20 and each[1:].max() < 80  # 50 of each are expected
    assert (places / (50 * 64) - 0.5).abs().max() < 0.05
    spread = torch.stack(counts).float().sort(dim=1).values.diff(dim=1)
    assert spread.max() <= 2  # within a batch the numbers are even steps
    one, same = (augment((windows, None), generator.manual_seed(3))[0] for _ in range(2))
    assert torch.equal(one, same)


def even(model, batch, device="cpu"):
    """The shown windows that `loss` gives a model, of a batch that did not go through `augment`."""
    seen = []

    def spy(shown):
        seen.append(shown)
        return model(shown)

    return loss(spy, batch, None)[1], seen[0]


def test_evaluation_hides_by_the_number_of_a_window_whatever_the_batch(library):
    torch.manual_seed(0)
    model, windows, numbers = TextNet(SIZES["tiny"]), some_windows(64), torch.arange(64)
    bits, shown = even(model, (windows, numbers))
    parts = [even(model, batch) for batch in zip(windows.split(5), numbers.split(5), strict=True)]
    assert torch.equal(torch.cat([part for _, part in parts]), shown)
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), bits, rtol=1e-4, atol=1e-4)
    assert (shown == MASK).sum(dim=1).tolist() == list(range(1, 65))  # every share of a window, once each


# --- net, loss, score


def test_loss_is_the_sum_over_hidden_bytes_by_their_share_and_by_the_length():
    windows, model = some_windows(4), TextNet(SIZES["tiny"])
    shown, _ = augment((windows, None), torch.Generator().manual_seed(0))
    value, bits = loss(model, (shown, windows), None)
    logits = model(shown).log_softmax(dim=2).detach()
    expected = []
    for row in range(4):
        hidden = [at for at in range(64) if shown[row, at] == MASK]
        nats = -sum(float(logits[row, at, int(windows[row, at])]) for at in hidden)
        expected.append(nats / (len(hidden) / 64) / 64)
    assert value.item() == pytest.approx(sum(expected) / 4, rel=1e-5)
    assert score(bits, None).tolist() == pytest.approx([nats / math.log(2) for nats in expected], rel=1e-5)


def unigram_bits_per_byte(workload) -> float:
    """Return what each test byte costs, predicted by how often it stands in the training text: the figure to beat."""
    train, test = (windows_of(workload, side) for side in (workload.train, workload.test))
    frequency = torch.bincount(train.flatten(), minlength=BYTES) + 1.0
    return float(-(frequency / frequency.sum()).log2()[test.long()].mean())


def test_the_bound_of_a_unigram_model_is_its_cross_entropy(library):
    few = dataclasses.replace(library, train=library.train[:2000])
    counts = torch.bincount(windows_of(few, few.train).flatten(), minlength=BYTES) + 1.0
    constant = (counts / counts.sum()).log()
    bits, _ = even(lambda shown: constant.expand(*shown.shape, -1), (windows_of(few, few.test), torch.tensor(few.test)))
    assert bits.mean().item() == pytest.approx(unigram_bits_per_byte(few), abs=0.1)


def test_net_looks_both_ways_and_minds_where_a_byte_stands():
    torch.manual_seed(0)
    net, shown = TextNet(SIZES["tiny"]), some_windows(1).long()
    middle = net(shown)[0, 32]
    for at in (3, 60):
        changed = shown.clone()
        changed[0, at] = MASK
        assert (net(changed)[0, 32] - middle).abs().max() > 1e-4
    moved = shown.clone()
    moved[0, [3, 60]] = shown[0, [60, 3]]
    assert (net(moved)[0, 32] - middle).abs().max() > 1e-4


def test_rotated_products_depend_on_the_distance_alone():
    net = TextNet(SIZES["tiny"])
    query, key = torch.randn(2, 1, 1, 1, 1, 32).expand(2, 1, 64, 1, 1, 32)
    query, key = rotate(query, net.turns)[0, :, 0, 0], rotate(key, net.turns)[0, :, 0, 0]
    products = query @ key.T  # [T, T]
    for distance in (-20, 0, 7):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert products[0, 7] != products[7, 0]


def test_one_window_does_not_depend_on_the_others_and_weights_start_truncated():
    torch.manual_seed(0)
    net, shown = TextNet(SIZES["tiny"]), some_windows().long()
    torch.testing.assert_close(net(shown), torch.cat([net(part) for part in shown.split(2)]), atol=1e-5, rtol=1e-5)
    for name, weight in net.named_parameters():
        assert weight.dim() == 1 or 1.5 < weight.abs().max() / weight.std() < 2.4, name  # 2 / 0.88 of what is asked
    assert "turns" not in net.state_dict()
    assert torch.equal(net.to(memory_format=torch.channels_last)(shown), net(shown))  # a plan may ask for it


def test_medium_has_the_size_it_says_and_suits_tensor_cores():
    shape = SIZES["medium"]
    with torch.device("meta"):
        net = TextNet(shape)
    assert 100e6 < sum(weight.numel() for weight in net.parameters()) < 150e6
    linears = [module for module in net.modules() if isinstance(module, torch.nn.Linear)]
    assert all(not size % 128 for linear in linears for size in linear.weight.shape)
    assert shape.width // shape.heads in (64, 128)


@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast_shortcuts_are_short_and_the_loss_is_not(device):
    net, windows = TextNet(SIZES["tiny"]).to(device), some_windows(device=device)
    kinds = []
    net.blocks[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    batch = (windows, torch.arange(6, device=device))
    wide, _ = loss(net, batch, None)
    with torch.autocast(device, torch.bfloat16):
        short, _ = loss(net, batch, None)
    assert kinds == [torch.float32, torch.bfloat16] and short.dtype == torch.float32
    assert short.item() == pytest.approx(wide.item(), rel=0.02)


def test_the_loop_learns_more_than_how_often_bytes_stand(library):
    history = fit(library, plan=Plan(log_every=25), device="cpu", progress=False)
    assert history.evaluation["value"] < unigram_bits_per_byte(library) - 0.2
    assert history.evaluation["metric"] == "bits_per_byte" and not library.higher_is_better
