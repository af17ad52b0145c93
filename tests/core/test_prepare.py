"""A plan applied to a loop that its author keeps: what must not change does not, what cannot be done is said."""

import copy
import operator

import pytest
import torch
from tiny import DEVICES, reset_switches
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from speedkit.data import own_loader
from speedkit.errors import PlanError, UsageError
from speedkit.plan import Plan
from speedkit.train import compile
from speedkit.train.prepare import prepare


@pytest.fixture(autouse=True)
def restored(every_format):
    yield
    reset_switches()
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(), Block())
        self.hidden, self.dropout, self.head = nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 2)

    def forward(self, x):
        rows = self.hidden(self.body(x).flatten(2).transpose(1, 2))  # [B, H * W, C]
        attended = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return self.head(self.dropout(attended.mean(1)))


def data():
    targets = torch.arange(40) % 2
    noise = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(noise + targets[:, None, None, None], targets)


def parts(device="cpu", make=torch.optim.AdamW, **options):
    model = Net().to(device)
    optimizer = make(model.parameters(), lr=3e-3, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    return model, optimizer, DataLoader(data(), **({"batch_size": 8, "shuffle": True} | options))


def train(model, optimizer, batches, epochs=2):
    """Somebody's loop, which knows nothing of plans: the loss of each step."""
    device, losses = next(model.parameters()).device, []
    torch.manual_seed(2)
    for _ in range(epochs):
        for inputs, targets in batches:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def fallbacks(prepared):
    return {fallback.field for fallback in prepared[2].effective.fallbacks}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "drop_last": True}], ids=str)
def test_the_baseline_plan_changes_nothing(device, options):
    prepared = prepare(Plan(), *parts(device, **options))
    assert train(*prepared) == train(*parts(device, **options))
    assert fallbacks(prepared) == set() and prepared[2].effective.plan.workers == options.get("num_workers", 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("plan", "off"),
    [
        ({"workers": 2, "prefetch_factor": 3}, 0),
        ({"checkpointing": "blocks"}, 0),
        ({"channels_last": True, "fused_optimizer": True}, 1e-4),
        ({"precision": "bf16", "checkpointing": "selective"}, 2e-2),
        ({"precision": "fp8-emulated"}, 2e-2),
    ],
    ids=str,
)
def test_a_field_is_applied_and_learns_the_same(plan, off, device):
    prepared = prepare(Plan(**plan), *parts(device))
    assert train(*prepared) == pytest.approx(train(*parts(device)), rel=0, abs=off)
    assert {name: getattr(prepared[2].effective.plan, name) for name in plan} == plan
    assert fallbacks(prepared) <= {"precision"}  # the layers that 8 bits are not for


def test_each_field_has_its_effect_on_the_same_model_and_optimizer():
    model, optimizer, loader = parts(batch_size=16)
    weights = list(model.parameters())
    fields = {"precision": "bf16", "channels_last": True, "attention": "math", "fused_optimizer": True, "workers": 2}
    prepared = prepare(Plan(**fields), model, optimizer, loader)
    assert prepared[0] is model and prepared[1] is optimizer and all(map(operator.is_, model.parameters(), weights))
    inside = []
    model.body[1].conv.register_forward_hook(lambda *call: inside.extend((call[2].dtype, call[2].is_contiguous())))
    model.hidden.register_forward_hook(lambda *call: inside.append(torch.nn.attention._cur_sdpa_kernel_backends()))
    inputs, _ = next(iter(prepared[2]))
    assert model(inputs).dtype == torch.float32
    assert inside == [torch.bfloat16, False, [torch.nn.attention.SDPBackend.MATH]]
    assert optimizer.param_groups[0]["fused"] and (len(prepared[2]), prepared[2].num_workers) == (3, 2)
    Net().load_state_dict(model.state_dict())
    average = copy.deepcopy(model).requires_grad_(False)  # a copy computes with weights of its own
    average.head.weight.zero_(), average.head.bias.zero_()
    assert not average(torch.ones(2, 3, 8, 8)).any() and model(torch.ones(2, 3, 8, 8)).any()


def test_the_name_of_a_plan_prepares_as_the_plan_does(capsys):
    by_name, by_plan = (prepare(plan, *parts())[2].effective for plan in ("careful", Plan.careful()))
    assert by_name == by_plan and by_name.plan.workers


def test_cudnns_timing_stays_as_the_script_has_set_it():
    torch.backends.cudnn.benchmark = True
    prepare(Plan(precision="bf16"), *parts())
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_can_leave_out_its_first_step(make):
    model, optimizer, _ = prepare(Plan(fused_optimizer=True), *parts(make=make))
    optimizer.found_inf = torch.ones(())  # as a GradScaler notes it
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, [data()[:8]], epochs=1)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    optimizer.found_inf.zero_()
    assert all(loss < 10 for loss in train(model, optimizer, [data()[:8]], epochs=5))


def test_compiled_code_learns_the_same(monkeypatch):
    graphs, plan = [], {"precision": "bf16", "attention": "math", "checkpointing": "blocks"}
    monkeypatch.setattr(compile, "BACKEND", lambda graph, inputs: graphs.append(graph) or graph.forward)
    prepared = prepare(Plan(compile="default", compile_scope="blocks", **plan), *parts(batch_size=16))  # 16, 16, 8
    losses = train(*prepared)
    assert graphs and fallbacks(prepared) == set()
    assert torch._dynamo.config.recompile_limit >= compile.RECOMPILE_LIMIT  # a graph for each kind and size of block
    assert losses == pytest.approx(train(*prepare(Plan(**plan), *parts(batch_size=16))), rel=1e-5)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class Counted(Dataset):
    """Samples that are counted as they are made, in one process; noisy ones are others every time."""

    def __init__(self, noisy=False):
        self.made, self.noisy = [], noisy

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.made.append(index)
        inputs, target = data()[index]
        return inputs + (torch.randn(()) if self.noisy else 0), target


def stream(dataset=None):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    return model, torch.optim.RMSprop(model.parameters()), DataLoader(dataset or Stream(), batch_size=8)


def augmented():
    return stream(Counted(noisy=True))


def test_a_cache_makes_each_sample_once_though_the_loader_had_workers(capsys, monkeypatch):
    dataset = Counted()
    options = {"batch_size": 8, "shuffle": True}
    prepared = prepare(Plan(cache="disk"), *parts()[:2], DataLoader(dataset, num_workers=2, **options), verbose=True)
    printed = capsys.readouterr().out
    assert "cache: asked disk, got ram" in printed and "workers" in printed
    dataset.made.clear()
    assert train(*prepared) == train(*parts()) and sorted(dataset.made) == [*range(40)]
    monkeypatch.setattr(own_loader, "free_bytes", lambda device: 1000)
    prepared = prepare(Plan(cache="ram"), *parts())
    assert fallbacks(prepared) == {"cache"} and "memory that is free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "plan", "says"),
    [
        (parts, {"micro_batch": 4}, "only your loop"),
        (stream, {"fused_optimizer": True}, "have a fused form"),
        (stream, {"checkpointing": "blocks"}, "has no repeated blocks"),
        (stream, {"workers": 2}, "give your loader a number"),
        (stream, {"cache": "ram"}, "no number to find them by"),
        (augmented, {"cache": "ram"}, "belongs in the loop"),
        (parts, {"precision": "fp16"}, "torch.amp.GradScaler"),
    ],
)
def test_what_these_parts_cannot_do_is_printed_and_the_loop_runs(make, plan, says, capsys):
    prepared = prepare(Plan(**plan), *make())
    assert fallbacks(prepared) == plan.keys() and prepared[2].effective.plan == Plan()
    printed = capsys.readouterr().out
    assert printed.startswith(f"prepare: {next(iter(plan))}: asked") and says in printed
    assert sum(len(targets) for _, targets in prepared[2]) == 40
    with pytest.raises(PlanError, match="strict=True allows no fallback"):
        prepare(Plan(**plan), *make(), strict=True)


def collate(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return {"pair": (inputs, [targets, "a word"])}


@pytest.mark.parametrize("device", DEVICES)
def test_whatever_a_batch_is_made_of_arrives_on_the_device(device):
    batches = BatchSampler(SequentialSampler(data()), 7, False)
    options = {"collate_fn": collate, "shuffle": False, "batch_size": 1, "batch_sampler": batches}
    _, _, loader = prepare(Plan(workers=2, persistent_workers=True, pin_memory=True), *parts(device, **options))
    for _ in range(2):
        for number, batch in enumerate(loader):
            inputs, (targets, word) = batch["pair"]
            assert inputs.device == targets.device == loader.device and word == "a word"
            assert torch.equal(inputs[0].cpu(), data()[7 * number][0])


@pytest.mark.slow  # Accelerate comes by make setup-all
def test_a_data_loader_with_batches_of_its_own_stays_as_it_is_for_one_reason(capsys):
    accelerate = pytest.importorskip("accelerate")
    shard = accelerate.Accelerator(cpu=True).prepare_data_loader(parts()[2])
    prepared = prepare(Plan.fast(), *parts()[:2], shard, seconds=7)
    assert prepared[2] is shard and sum(len(targets) for _, targets in shard) == 40
    reasons = {fallback.field: fallback.why for fallback in shard.effective.fallbacks}
    assert "compiling takes about 45 s, and would save 2 s" in reasons["compile"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"prepare: {len(reasons)} fields of the plan do not apply here (") and "compile" in line


def test_a_loader_that_is_no_data_loader_is_refused():
    with pytest.raises(UsageError, match="a list makes its batches in its own way"):
        prepare(Plan(), *parts()[:2], [1, 2])
