"""What a lesson offers to paste runs as it stands in a reader's script, and keeps what it promises there."""

import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import socket
import tarfile
import types

import numpy as np
import pytest
import torch
from processes import ROOT, TESTS
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from speedkit.lessons.planted import busy
from speedkit.measure.stats import paired_interval

LESSONS = [f"{number:02}" for number in (0, 1, 2, 10, 11, 12, 14, *range(20, 29), 30, 40, 41, 50, 90)]
PASTE = re.compile(r"## Paste this\n\n.*\n\n```python\n(.*)\n```", re.DOTALL)
FIRST = re.compile(r"## Paste this\n\n.*?\n\n```python\n(.*?)\n```.*", re.DOTALL)
PACKED = re.compile(r".*\n```python\n(from torch\.nn\.attention\.varlen.*)\n```", re.DOTALL)
PROFILER = re.compile(r"PyTorch's own profiler.*\n```python\n(.*)\n```\n.*", re.DOTALL)
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="takes g++, to compile or to stand in for a GPU")


def block(lesson, offer=PASTE):
    """The code that a lesson offers."""
    [path] = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    [found] = filter(None, map(offer.fullmatch, sources))
    return found[1]


def paste(lesson, switches=(), **names):
    """Run it where these names are known, with some lines changed; return all names that are known then."""
    code = block(lesson)
    for line, other in dict(switches).items():
        assert line in code
        code = code.replace(line, other)
    exec(compile(code, f"lesson {lesson}", "exec"), names)
    return types.SimpleNamespace(**names)


class Block(torch.nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.rest = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Dropout(dropout))

    def forward(self, hidden):
        return self.rest(self.linear(hidden))


class Asking(Block):
    def forward(self, hidden):
        return super().forward(hidden) if hidden.sum() > 0 else hidden


class Net(torch.nn.Module):
    """A classifier of rows of 8 numbers, with two blocks that are alike, and a head."""

    def __init__(self, dropout=0.0, width=16):
        super().__init__()
        self.stem = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = torch.nn.Linear(width, 4)

    def forward(self, inputs):
        hidden = self.stem(inputs)
        for each in self.blocks:
            hidden = each(hidden)
        return self.head(hidden)


def rows(count=24):
    return TensorDataset(torch.randn(count, 8), torch.arange(count) % 4)


def script(model, data, batch_size=8, fused=False):
    """The names of a reader's script that trains a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    loader = DataLoader(data, batch_size)
    return {"model": model, "criterion": functional.cross_entropy, "optimizer": optimizer, "loader": loader}


def learn(names):
    """The losses of an ordinary loop, once over the data."""
    losses = []
    for inputs, targets in names["loader"]:
        names["optimizer"].zero_grad()
        loss = functional.cross_entropy(names["model"](inputs), targets)
        loss.backward()
        names["optimizer"].step()
        losses.append(loss.item())
    return losses


def gradients(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_on_a_technique_has_a_few_lines_of_plain_pytorch(lesson):
    lines = [line for line in block(lesson).splitlines() if line.strip()]
    assert 5 <= len(lines) <= 15 and max(map(len, lines)) <= 88
    assert "speedkit" not in block(lesson)


class Slow(TensorDataset):
    """Rows that take 2 ms each to make."""

    def __getitem__(self, index):
        busy(0.002)
        return super().__getitem__(index)


def test_a_step_that_computes_nothing_waits_for_data(capsys):
    seen = []
    loader = DataLoader(Slow(*rows(120).tensors), 8)
    after = paste("00", loader=loader, step=lambda batch: seen.append(batch[0]))
    first, _ = next(iter(loader))
    alike = [torch.equal(each, first) for each in seen]
    orders = [60 * [True] + [True] + 14 * [False], [True] + 14 * [False] + 60 * [True]]  # a coin decides
    assert all(alike[begin : begin + 75] in orders for begin in (0, 75, 150)) and len(alike) == 3 * 75
    assert after.whole_s > 8 * 0.002 and after.waiting > 0.5
    assert f"of which {after.waiting:.0%} waits for data" in capsys.readouterr().out


def test_pairs_of_turns_have_the_interval_of_a_comparison(capsys):
    turns = []
    after = paste("01", a=lambda: busy(0.001) or turns.append("a"), b=lambda: turns.append("b"))
    assert turns.count("a") == turns.count("b") == 3 + 40
    pairs = [*zip(turns[6::2], turns[7::2], strict=True)]
    assert all(len({*pair}) == 2 for pair in pairs) and len({*pairs}) == 2  # a coin decides who goes first
    expected = paired_interval([math.exp(each) for each in after.logs], [1.0] * 40)
    assert (after.ratio, after.low, after.high) == pytest.approx(dataclasses.astuple(expected), rel=1e-3)
    assert after.low > 1 and f"({after.low:.3f} to" in capsys.readouterr().out
    assert any(paste("01", a=turns.clear, b=turns.clear).logs)  # A/A: two times, not one twice


def test_a_profile_has_five_steps_of_a_loop_and_leaves_their_timeline(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, steps = Net(), []
    names = {"loader": DataLoader(rows(160), 8), "step": lambda batch: steps.append(model(batch[0]))}
    exec(block("02", PROFILER), names)
    assert len(steps) == 12
    counts = {event.key: event.count for event in names["profiler"].key_averages()}
    assert counts["aten::addmm"] == 5 * 4  # linear layers
    assert [count for name, count in counts.items() if name.startswith("enumerate(DataLoader)#")] == [5]
    assert "Self CPU" in capsys.readouterr().out
    assert "aten::addmm" in (tmp_path / "steps.json").read_text()


def test_laps_give_each_part_its_share_of_a_step_and_what_it_bounds(capsys):
    after = paste("02")
    for _ in range(3):
        after.lap("data wait")
        busy(0.003)
        after.lap("forward")
    assert min(after.booked["forward"]) >= 0.003 and len(after.booked["data wait"]) == 3
    after.booked.update({"data wait": 10 * [1.0], "forward": 10 * [3.0]})
    after.shares()
    wait, forward = capsys.readouterr().out.splitlines()
    assert wait == "data wait: 25%; without it 1.33 times as fast"
    assert forward == "forward: 75%; without it 4.00 times as fast"


def test_workers_the_fewest_of_the_fastest_win_and_give_every_sample(capsys):
    steps = []
    after = paste("10", data=rows(40), step=steps.append, __name__="__main__")
    tried = [workers for workers in (0, 1, 2, 4, 8) if workers <= os.cpu_count()]
    assert len(steps) == 4 * len(tried) * 2 and [*after.took] == tried
    quick = [workers for workers, took_s in after.took.items() if took_s < 1.05 * min(after.took.values())]
    assert after.loader.num_workers == min(quick)
    assert f"chosen: {min(quick)}" in capsys.readouterr().out
    assert sorted(torch.cat([targets for _, targets in after.loader])) == sorted(torch.arange(40) % 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tar_is_shuffled_and_has_the_bits_of_single_files(workers, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    names = [f"night/{number}.{ending}" for number in range(4) for ending in ("wav", "flac")]
    (tmp_path / "night").mkdir()
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        tar.add(tmp_path / "night", "night")  # no clip
        for name in names:
            soundfile.write(tmp_path / name, torch.rand(100).numpy(), 8000, subtype="PCM_16")
            tar.add(tmp_path / name, name)
    data = paste("11", path=tmp_path / "clips.tar").data
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(data, 2, shuffle=True, num_workers=workers, persistent_workers=workers > 0, generator=order)
    for _ in range(2):
        batches = [*loader]
        told = [name for _, batch in batches for name in batch]
        assert told != names and sorted(told) == sorted(names)
        for name, sound in zip(told, torch.cat([sounds for sounds, _ in batches]), strict=True):
            assert torch.equal(sound, torch.from_numpy(soundfile.read(tmp_path / name, dtype="float32")[0]))


def test_a_picture_is_decoded_no_larger_than_it_is_wanted(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.linear_gradient("L").convert("RGB").resize((1024, 768)).save(tmp_path / "large.jpg")
    image.linear_gradient("L").save(tmp_path / "grey.png")
    names = {}
    exec(block("11", FIRST), names)
    small = names["picture"](tmp_path / "large.jpg")
    assert small.shape == (192, 256, 3) and small.dtype == torch.uint8
    whole = torch.from_numpy(np.array(image.open(tmp_path / "large.jpg").resize((256, 192))))
    assert (small.float() - whole.float()).abs().mean() < 2
    assert names["picture"](tmp_path / "grey.png", size=(10, 20)).shape == (20, 10, 3)


class Counting(Dataset):
    """Items that count, in any process, how often they are made."""

    def __init__(self):
        self.made = torch.zeros(6, dtype=torch.long).share_memory_()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.made[index] += 1
        return torch.full((2,), index, dtype=torch.uint8), index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cached_data_set_makes_nothing_in_the_second_epoch(workers):
    source = Counting()
    loader = DataLoader(paste("12", data=source).data, batch_size=2, num_workers=workers)
    first = [*loader]
    made = source.made.tolist()
    assert made == [9, 1, 1, 1, 1, 1]  # the first item told the shape, too, and was made again to compare
    for (inputs, targets), (again, labels) in zip(first, loader, strict=True):
        assert torch.equal(inputs, again) and torch.equal(targets, labels)
        assert inputs.dtype == torch.uint8 and torch.equal(inputs[:, 0].long(), targets)
    assert source.made.tolist() == made


class Random(Counting):
    def __getitem__(self, index):
        return torch.rand(2), index


def test_a_cache_refuses_items_that_are_random():
    with pytest.raises(AssertionError, match="random"):
        paste("12", data=Random())


def test_the_search_leaves_model_and_optimizer_alone_and_steps_in_parts_are_those_of_the_batch():
    names = script(Net(dropout=0.1), rows())
    names |= {"inputs": torch.randn(12, 8), "targets": torch.arange(12) % 4}
    before, random = copy.deepcopy(names["model"].state_dict()), torch.get_rng_state()
    after = paste("20", **names)
    for name, tensor in after.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert not after.optimizer.state and torch.equal(torch.get_rng_state(), random)
    assert [*after.took] == [1, 3, 6, 12] and after.twin[1].state
    fast = [size for size, seconds in after.took.items() if seconds < 1.03 * min(after.took.values())]
    assert after.micro_batch == max(fast)
    ends = []
    for size in (after.micro_batch, 5, 12):
        model = Net()
        model.load_state_dict(before)
        after.step(model, torch.optim.SGD(model.parameters(), lr=0.1), after.inputs, after.targets, size)
        ends.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert all(torch.allclose(end, ends[-1], atol=1e-6) for end in ends)


def test_mixed_precision_trains_in_bfloat16_on_a_cpu_too():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    try:
        after = paste("21", **script(model, rows()))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert after.device == "cpu" and after.dtype == torch.bfloat16 and after.loss.isfinite()
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert not torch.equal(model.stem.weight, before["stem.weight"])


@compiler
@pytest.mark.slow
def test_compiled_blocks_share_their_code_and_a_graph_break_is_an_error(capsys):
    model, inputs = Net(), torch.randn(4, 8)
    eager = model(inputs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    paste("23", model=model, step=lambda: model(inputs).sum().backward())
    assert torch.allclose(model(inputs), eager, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert "pays from step" in capsys.readouterr().out
    broken = Net()
    broken.blocks[0] = Asking(16, 0.0)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        paste("23", model=broken, step=lambda: broken(inputs))
    whole = {"by_blocks = True": "by_blocks = False"}
    one = Net()
    paste("23", whole, model=one, step=lambda: one(inputs))
    with pytest.raises(TypeError, match=r"write model = torch.compile\(model"):
        paste("23", whole, model=torch.nn.Sequential(torch.nn.Linear(8, 4)), step=list)


class First(torch.nn.Module):
    def forward(self, results):
        return results[0]


def test_channels_last_is_timed_beside_nchw_and_the_layer_that_undoes_it_is_named(capsys):
    layers = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.InstanceNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)
    pooled = torch.nn.MaxPool2d(2, return_indices=True), First(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, *pooled)
    before = copy.deepcopy(model.state_dict())
    data = TensorDataset(torch.randn(16, 3, 8, 8), torch.arange(16) % 4)
    after = paste("24", **script(model, data), device="cpu")
    *times, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"InstanceNorm2d\(.*\) returns NCHW", line)
    names, seconds = zip(*map(str.split, times), strict=True)
    assert names == ("torch.contiguous_format", "torch.channels_last") * 3 and min(map(float, seconds)) > 0
    assert after.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(after.net(after.images), model(after.images), atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.is_contiguous(), name
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("dimensions", [3, 4])
def test_attention_tells_which_kernel_ran_in_a_step_and_which_refuses(capsys, dimensions):
    query, key, value = torch.randn(3, 2, 4, 16, 8)
    mask = torch.randn((1, 4, 16, 16)[-dimensions:])
    layer = functools.partial(functional.scaled_dot_product_attention, query, key, value, attn_mask=mask)
    paste("25", query=query, key=key, value=value, mask=mask, step=lambda: [layer(), layer()])
    lines = capsys.readouterr().out.splitlines()
    ran, refused = ([line for line in lines if ("refused" in line) == part] for part in (False, True))
    assert any(line.startswith("2 ") for line in ran)
    assert any("flash" in line for line in ran) == (dimensions == 4)
    exact = (query @ key.transpose(-2, -1) / 8**0.5 + mask).softmax(-1) @ value
    assert torch.allclose(layer(), exact, atol=1e-5)
    assert any("FLASH_ATTENTION refused" in line for line in refused) == (dimensions == 3)
    assert any("CUDNN_ATTENTION refused" in line for line in refused)


def test_the_quiet_loop_learns_the_same_and_reads_where_it_prints(capsys):
    from speedkit.measure.waits import audit

    model, data = Net(), rows(102)
    losses = learn(script(copy.deepcopy(model), data, batch_size=2, fused=True))
    seen = []
    reads = audit(
        lambda: seen.append(paste("26", **script(model, data, batch_size=2, fused=True))), torch.device("cpu")
    )
    assert torch.stack(seen[0].kept)[:, 0].tolist() == losses[50:]  # those before were printed
    in_loop = [read.count for read in reads if read.line > 4]  # where an epoch begins, a DataLoader draws a seed
    assert in_loop == [1]
    step, *means = capsys.readouterr().out.replace("[", "").replace("]", "").replace(",", "").split()
    loss, norm, accuracy = map(float, means)
    assert step == "50" and loss == pytest.approx(sum(losses[:50]) / 50) and norm > 0 and 0 <= accuracy <= 1


def test_what_is_computed_twice_is_not_kept_and_changes_no_gradient():
    from speedkit.lessons.step_memory import activation_bytes

    model, inputs = Net(dropout=0.5, width=64), torch.randn(32, 8)

    def measured():
        torch.manual_seed(0)
        model.zero_grad()
        model(inputs).sum().backward()
        return gradients(model), activation_bytes(lambda: model(inputs).sum(), torch.device("cpu"))

    before, kept = measured()
    names = [*model.state_dict()]
    paste("27", model=model, step=lambda: None)
    after, fewer = measured()
    assert torch.equal(before, after) and fewer < 0.7 * kept
    assert [*model.state_dict()] == names


def test_the_number_of_threads_is_that_of_the_shortest_step():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        after = paste("28", step=lambda: torch.randn(64, 64).sum())
        assert [*after.seconds] == [1, 2]
        pays = after.seconds[1] < 0.95 * after.seconds[2]
        assert torch.get_num_threads() == (1 if pays else 2)
    finally:
        torch.set_num_threads(before)


def test_the_guard_leaves_no_trace_of_a_bad_batch():
    data = rows()
    good = torch.utils.data.Subset(data, [*range(8), *range(16, 24)])
    data.tensors[0][9, 3] = torch.nan
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    guarded = paste("30", **script(copy.deepcopy(model), data, fused=True))
    clean = paste("30", **script(model, good, fused=True))
    for name, tensor in guarded.model.state_dict().items():
        assert torch.equal(tensor, clean.model.state_dict()[name]), name
    assert guarded.guard.get_scale() == 1.0  # halved by each bad step, it would end at 0, and training with it


def test_the_guard_gives_up_where_every_batch_is_bad():
    data = rows(8 * 51)
    data.tensors[0][8:] = torch.nan
    with pytest.raises(RuntimeError, match="50 bad steps"):
        paste("30", **script(Net(), data, fused=True))


def test_the_guard_leaves_no_trace_of_a_finite_loss_whose_gradients_are_not():
    data = rows(8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    before = copy.deepcopy(model.state_dict())

    def criterion(outputs, targets):
        return functional.cross_entropy(outputs, targets) + (outputs - outputs.detach()).abs().sqrt().sum()

    after = paste("30", **script(model, data, fused=True) | {"criterion": criterion})
    assert after.loss.isfinite() and not after.norm.isfinite()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def rank(number, port, out, fits):
    """What one of two processes does: a script of the reader's, under torchrun's variables."""
    variables = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.manual_seed(0)
    data = rows(64)
    orders, devices = [], []
    torch.cuda.set_device = devices.append  # of a machine that may have none

    def train_epoch(model, optimizer, loader):
        orders.extend(inputs[:, 0].tolist() for inputs, _ in loader)  # the order is that of the epoch
        learn({"model": model, "optimizer": optimizer, "loader": loader})

    names = {"make_model": Net, "data": data, "train_epoch": train_epoch, "epochs": 2, "fits": fits}
    model = paste("40", {'.to("cuda")': ""}, **names).model
    assert devices == [number]
    weights = [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in model.parameters()]
    torch.save((orders, data.tensors[0][:, 0].tolist(), weights), out / f"{number}.pt")
    os._exit(0)  # on Python's way out the threads of gloo abort it now and then


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False], ids=["DDP", "FSDP2"])
def test_two_ranks_share_each_epoch_in_another_order_and_learn_what_one_does(tmp_path, free_port, fits):
    torch.multiprocessing.start_processes(rank, (free_port, tmp_path, fits), nprocs=2, start_method="spawn")
    (orders, data, weights), (others, *_) = (torch.load(tmp_path / f"{number}.pt") for number in range(2))
    for mine, theirs in zip(orders, others, strict=True):
        assert sorted(mine + theirs) == sorted(data)
    assert orders[0] != orders[1]
    torch.manual_seed(0)
    whole = rows(64)
    names = script(Net(), whole, batch_size=64)
    names["optimizer"].param_groups[0]["lr"] = 1e-3
    for _ in range(2):
        learn(names)
    for ours, alone in zip(weights, names["model"].parameters(), strict=True):
        assert torch.allclose(ours, alone, atol=1e-4)


@compiler
@pytest.mark.slow
def test_int8_keeps_the_outputs_near_in_a_quarter_of_the_bytes():
    model = Net(width=64)
    inputs = torch.randn(32, 8)
    exact = model(inputs)
    with torch.no_grad():
        after = paste("41", model=model).model
        assert (after(inputs) - exact).norm() < 0.05 * exact.norm()
    inner = after._orig_mod.blocks[0].linear.weight
    assert inner.qdata.dtype == torch.int8 and inner.qdata.shape == (64, 64)
    assert type(after._orig_mod.head.weight.data) is torch.Tensor  # 8 does not divide its 4 outputs


def test_a_promise_is_measured_in_pairs_of_random_order():
    steps = []
    after = paste("50", before=lambda: steps.append("before"), after=lambda: steps.append("after"))
    pairs = [*zip(steps[::2], steps[1::2], strict=True)]
    assert {*pairs} == {("before", "after"), ("after", "before")} and len(after.ratios) == len(pairs) - 10
    outside = [ratio for ratio in after.ratios if not after.low <= ratio <= after.high]
    inside = [ratio for ratio in after.ratios if after.low < ratio < after.high]
    # Of 40 the median lies between the 12th and the 29th in 99 of 100 cases; some ratios may be equal to an end.
    assert len(outside) <= 22 and len(inside) <= 16 and {after.low, after.high} <= {*after.ratios}


class Pictures(Counting):
    def __getitem__(self, index):
        super().__getitem__(index)
        return torch.full((2, 4, 4), index / 6), index


def test_the_plan_that_won_makes_each_input_once_and_learns_as_plain_pytorch_does(capsys):
    data = Pictures()
    layers = torch.nn.Conv2d(2, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 6)
    model = torch.nn.Sequential(*layers)
    plain = script(copy.deepcopy(model), data, batch_size=6)
    plain["optimizer"] = torch.optim.AdamW(plain["model"].parameters())
    before = copy.deepcopy(model)
    [loss] = learn(plain)
    names = {"model": model, "criterion": functional.cross_entropy, "device": "cpu", "batch_size": 6, "data": data}
    after = paste("90", **names, lr=1e-3)
    assert data.made.tolist() == [2] * 6  # once in each loop
    assert after.cached.tensors[0].dtype == torch.float16 and after.optimizer.defaults["fused"]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert capsys.readouterr().out == f"step 0: {after.loss.item():.4f}\n"
    assert after.loss.item() == pytest.approx(loss, rel=0.01)
    ours, theirs, start = (
        torch.cat([w.detach().flatten() for w in net.parameters()]) for net in (model, plain["model"], before)
    )
    assert (ours - theirs).norm() < 0.3 * (theirs - start).norm()


# On a GPU that is not there: what these return, a process that has it does.


def on_gpu(function, gpu):
    from speedkit.dry.gpus import GPUS
    from speedkit.dry.process import run

    return run(f"test_paste:{function}", GPUS[gpu])


@pytest.fixture
def gpu(monkeypatch):
    """Run one of the functions below on a GPU."""
    monkeypatch.syspath_prepend(str(TESTS / "lessons"))
    return on_gpu


def copied_ahead():
    from speedkit.dry.counts import counted

    loader = DataLoader(rows(), 8, pin_memory=True)
    batch = next(iter(loader))[0]
    at_home = batch.cuda()
    ahead = paste("14", copy=lambda: batch.to("cuda"), step=lambda: at_home @ at_home.T).ahead
    with counted() as counts:
        shapes = [(tensor.device.type, len(tensor)) for batch in ahead(loader) for tensor in batch]
    return shapes, dict(counts.names["memcpy"]), counts["sync"]


@pytest.mark.slow
@compiler
def test_batches_are_copied_from_page_locked_memory_and_nobody_waits(gpu):
    shapes, copies, waits = gpu("copied_ahead", "H100")
    assert shapes == [("cuda", 8)] * 6 and waits == 0
    assert sum(copies.values()) == 6 and all("Pinned" in name for name in copies)


def mixed():
    model = Net().cuda()
    after = paste("21", **script(model, rows(), fused=True))
    kinds = {weight.dtype for weight in model.parameters()} | {weight.grad.dtype for weight in model.parameters()}
    return str(after.dtype), after.scaler.is_enabled(), [*map(str, kinds)], torch.backends.cuda.matmul.allow_tf32


@pytest.mark.slow
@compiler
@pytest.mark.parametrize(("name", "dtype", "scaled"), [("T4", "float16", True), ("H100", "bfloat16", False)])
def test_a_gpu_gets_the_16_bits_that_it_has_units_for(gpu, name, dtype, scaled):
    assert gpu("mixed", name) == (f"torch.{dtype}", scaled, ["torch.float32"], True)


def eight_bits():
    model = Net(width=1024).cuda()
    paste("22", {"min(sizes) >= 4096": "min(sizes) >= 1024"}, model=model)  # a net that is quickly compiled
    with torch.autocast("cuda", torch.bfloat16):
        model(torch.randn(16, 8, device="cuda")).sum().backward()
    eight = [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"]
    return eight, [weight.dtype == weight.grad.dtype == torch.float32 for weight in model.parameters()]


@compiler
@pytest.mark.slow
def test_wide_linear_layers_are_multiplied_in_8_bits_and_their_weights_stay(gpu):
    pytest.importorskip("torchao")
    eight, wide_weights = gpu("eight_bits", "H100")
    assert eight == ["blocks.0.linear", "blocks.1.linear"] and all(wide_weights)


def packed():
    query, key, value = torch.randn(3, 2, 4, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    names = {"torch": torch, "query": query, "key": key, "value": value, "lengths": torch.tensor([5, 16]).cuda()}
    exec(block("25", PACKED), names)
    names["output"].square().sum().backward()
    return names["output"].shape, str(names["ends"].dtype)


@compiler
def test_clips_are_packed_for_attention_that_takes_their_ends(gpu):
    shape, ends = gpu("packed", "H100")
    assert shape[1:] == (4, 64) and ends == "torch.int32"


def computed_twice():
    model, inputs = Net(width=1024).cuda(), torch.randn(1 << 16, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    after = paste("27", model=model, step=step)
    return after.before, after.peak_mb()


@pytest.mark.slow
@compiler
def test_the_peak_before_and_after_is_that_of_a_step(gpu):
    before, after = gpu("computed_twice", "H100")
    weights_and_moments_mb = 3 * 4 * 2 * 1024**2 / 1e6
    assert weights_and_moments_mb < after < 0.9 * before


def too_large():
    torch.cuda.set_per_process_memory_fraction(0.01)
    layers = torch.nn.Linear(8, 1 << 20), torch.nn.ReLU(), torch.nn.Linear(1 << 20, 4)
    names = script(torch.nn.Sequential(*layers).cuda(), rows())
    names |= {"inputs": torch.randn(64, 8, device="cuda"), "targets": torch.arange(64, device="cuda") % 4}
    return [*paste("20", **names).took]


@pytest.mark.slow
@compiler
def test_what_does_not_fit_ends_the_doubling(gpu):
    tried = gpu("too_large", "H100")
    assert tried == [2**power for power in range(len(tried))] and 0 < len(tried) < 7
