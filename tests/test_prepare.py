"""A plan applied to a loop that its author keeps: what must not change does not, what cannot be done is said."""

import copy
import io
import random
from typing import NamedTuple

import pytest
import torch
from tiny import emulating
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from speedkit.errors import PlanError, UsageError
from speedkit.plan import Plan
from speedkit.train import compilation, own_loader
from speedkit.train import prepare as module
from speedkit.train.prepare import prepare

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


class Pictures(Dataset):
    """(picture [3, 8, 8], class) of each index; how often each was made is counted, and `change` may add to it."""

    def __init__(self, change=None, count=40):
        self.change, self.made = change, [0] * count

    def __len__(self):
        return len(self.made)

    def __getitem__(self, at):
        self.made[at] += 1
        picture = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(at)) + at % 2
        return (picture if self.change is None else self.change(picture, at)), at % 2


class Stream(IterableDataset):
    def __iter__(self):
        return (Pictures()[at] for at in range(40))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


def net(device="cpu"):
    torch.manual_seed(1)
    body = nn.Conv2d(3, 16, 3, padding=1), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)
    return nn.Sequential(*body, nn.Linear(16, 2)).to(device)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loader(data=None, **options):
    return DataLoader(Pictures() if data is None else data, **({"batch_size": 8, "shuffle": True} | options))


def loop(model, optimizer, batches, epochs=2, schedule=None, clip=None):
    """Somebody's loop, which knows nothing of plans: the loss of each step."""
    device, losses = next(model.parameters()).device, []
    for _ in range(epochs):
        for inputs, targets in batches:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.detach())
        if schedule is not None:
            schedule.step()
    return torch.stack(losses).tolist()


def losses(plan, device="cpu", make=adamw, data=None, epochs=2, **options):
    """The losses of that loop under a plan (None: bare), and what the plan became."""
    model = net(device)
    parts, effective = (model, make(model), loader(data, **options)), None
    if plan is not None:
        parts = prepare(plan, *parts)
        effective = parts.effective
    torch.manual_seed(2)
    return loop(*parts, epochs=epochs), effective


def fields(effective):
    return {found.field for found in effective.fallbacks}


# ---- what must not change the numbers ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"drop_last": True, "batch_size": 16}], ids=str)
def test_the_naive_plan_changes_nothing(device, options):
    found, effective = losses(Plan(), device, **options)
    assert found == losses(None, device, **options)[0]
    assert effective.fallbacks == () and effective.plan.workers == options.get("num_workers", 0)


@pytest.mark.parametrize(
    "plan",
    [{"cache": "ram"}, {"workers": 2, "persistent_workers": True, "prefetch_factor": 3}, {"checkpointing": "blocks"}],
    ids=str,
)
def test_what_loads_and_what_is_recomputed_is_bit_identical(plan):
    found, effective = losses(Plan(**plan))
    assert found == losses(None)[0] and effective.fallbacks == ()


def test_a_cache_makes_each_sample_once():
    data = Pictures()
    _, effective = losses(Plan(cache="device"), data=data, epochs=3)
    assert effective.plan.cache == "ram" and fields(effective) == {"cache"}
    assert max(data.made) <= 3 and sum(data.made) <= 40 + 2 * 20  # and some twice before, to see whether they repeat


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "plan",
    [
        {"channels_last": True},
        {"fused_optimizer": True},
        {"attention": "math"},
        {"channels_last": True, "fused_optimizer": True, "checkpointing": "blocks"},
    ],
    ids=str,
)
def test_what_only_rounds_otherwise_is_equal_to_tolerance(plan, device):
    found, effective = losses(Plan(**plan), device)
    assert found == pytest.approx(losses(None, device)[0], rel=1e-4) and effective.fallbacks == ()


@pytest.mark.parametrize("make", [adamw, sgd])
def test_an_optimizer_keeps_its_state_and_its_schedule(make):
    def trained(*plans):
        model, batches = net(), loader()
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for plan in plans:
            torch.manual_seed(3)
            loop(model, optimizer, batches, schedule=schedule)
            if plan is not None:
                model, optimizer, batches = prepare(plan, model, optimizer, batches)
        return loop(model, optimizer, batches, schedule=schedule), optimizer.param_groups[0]["lr"]

    (found, rate), (bare, bare_rate) = trained(Plan(fused_optimizer=True, channels_last=True)), trained(None)
    assert found == pytest.approx(bare, rel=1e-4) and rate == bare_rate
    restarted = net()
    fresh = make(restarted)
    loop(restarted, fresh, loader())
    fresh.state.clear()
    assert loop(restarted, fresh, loader()) != pytest.approx(bare, rel=1e-4)  # a lost state would show


# ---- number formats ----


@pytest.fixture
def emulated(monkeypatch):
    """This machine, as if its CPU had every number format."""
    monkeypatch.setattr(module, "this_machine", emulating)


@pytest.mark.parametrize(
    ("plan", "off"),
    [
        ({"precision": "bf16"}, 2e-2),
        ({"precision": "fp16"}, 5e-3),
        ({"precision": "fp16", "checkpointing": "selective"}, 5e-3),
        ({"precision": "fp8-emulated", "channels_last": True}, 5e-2),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [adamw, sgd])
def test_short_formats_learn_the_same_within_tolerance(plan, off, make, emulated):
    found, effective = losses(Plan(**plan), make=make)
    bare = losses(None, make=make)[0]
    assert found == pytest.approx(bare, rel=off) and found != bare
    assert effective.plan.precision == plan["precision"]


def test_float16_gradients_are_unscaled_wherever_the_loss_takes_them_from(emulated):
    def gradients(plan, short=False):
        """Of a loss on two outputs, on a weight itself, and on an input that another layer made."""
        torch.manual_seed(4)
        before, model = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        if plan is not None:
            prepare(plan, model, adamw(model), [])
        with torch.autocast("cpu", torch.float16, enabled=short):
            outputs, others = model(before(torch.ones(4, 8))), model(torch.zeros(1, 8))
        (1e-7 * (outputs.square().mean() + others.float().sum()) + 1e-7 * model[0].weight.square().sum()).backward()
        return [weight.grad for weight in (*before.parameters(), *model.parameters())]

    true = gradients(None)
    for mine, other in zip(gradients(Plan(precision="fp16")), true, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=1e-11)
    assert not any(
        torch.allclose(mine, other, rtol=2e-2, atol=1e-11)
        for mine, other in zip(gradients(None, short=True), true, strict=True)
    )


def test_weights_that_layers_share_stay_shared(emulated):
    def gradients(plan):
        torch.manual_seed(4)
        model = nn.Sequential(first := nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), first)
        model[2].weight = first.weight
        if plan is not None:
            prepare(plan, model, adamw(model), [])
        model(torch.ones(4, 8)).square().mean().backward()
        assert model[0].weight is model[2].weight is model[3].weight
        return [weight.grad for weight in model.parameters()]

    for mine, true in zip(gradients(Plan(precision="fp16")), gradients(None), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_step_that_overflows_float16_is_left_out_and_the_next_one_made(make, emulated):
    model = net()
    _, optimizer, _ = prepare(Plan(precision="fp16"), model, make(model), [])
    call = vars(model)["_compiled_call_impl"]
    call.scale.scale.fill_(2.0**40)
    before = copy.deepcopy(model.state_dict())
    loop(model, optimizer, loader(shuffle=False, batch_size=40), epochs=1)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert call.scale.scale == 2.0**39 and call.scale.steps == 0
    call.scale.scale.fill_(2.0**10)
    loop(model, optimizer, loader(shuffle=False, batch_size=40), epochs=1, clip=0.5)
    assert call.scale.steps == 1 and all(weight.isfinite().all() for weight in model.parameters())
    assert not all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("case", ["recurrent", "rmsprop", "dampened"])
def test_float16_without_what_loss_scaling_takes_becomes_bf16_and_says_so(case, emulated):
    model = nn.GRU(4, 4) if case == "recurrent" else net()
    optimizer = {
        "recurrent": adamw,
        "rmsprop": lambda model: torch.optim.RMSprop(model.parameters()),
        "dampened": lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9, 0.5),
    }[case](model)
    effective = prepare(Plan(precision="fp16"), model, optimizer, []).effective
    assert effective.plan.precision == "bf16" and "GradScaler" in str(effective.fallbacks[-1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float16_takes_no_cuda_graphs():
    model = net("cuda")
    effective = prepare(Plan(precision="fp16", compile="reduce-overhead"), model, adamw(model), []).effective
    assert effective.plan.compile == "default" and "copy all weights" in str(effective)


def test_outputs_are_float32_wherever_they_are_in_what_is_returned(emulated):
    class Named(nn.Linear):
        def forward(self, x, also):
            return {"logits": super().forward(x), "parts": (super().forward(also["x"]), "a word")}

    model = Named(8, 2)
    prepare(Plan(precision="bf16"), model, adamw(model), [])
    inside = []
    model.register_forward_hook(lambda *found: inside.append(found[2]["logits"].dtype))
    found = model(torch.ones(1, 8), also={"x": torch.ones(1, 8)})
    assert found["logits"].dtype == found["parts"][0].dtype == torch.float32 and found["parts"][1] == "a word"
    assert inside == [torch.bfloat16]


# ---- what the user holds ----


@pytest.mark.parametrize(
    "plan",
    [{"precision": "fp16"}, {"compile": "default"}, {"checkpointing": "blocks"}, {"precision": "fp8-emulated"}],
    ids=str,
)
def test_model_and_optimizer_stay_what_they_were(plan, emulated):
    model = net()
    optimizer = adamw(model)
    names, weights, groups = list(model.state_dict()), list(model.parameters()), optimizer.state_dict().keys()
    prepared = prepare(Plan(**plan), model, optimizer, loader())
    assert prepared.model is model and prepared.optimizer is optimizer
    assert list(model.state_dict()) == names and optimizer.state_dict().keys() == groups
    assert all(mine is before for mine, before in zip(model.parameters(), weights, strict=True))
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    net().load_state_dict(torch.load(stored))
    twin = copy.deepcopy(model)  # an average of weights, say
    assert twin(torch.ones(2, 3, 8, 8)).shape == (2, 2) and "_compiled_call_impl" not in vars(twin)
    assert prepared.loader.batch_size == 8 and prepared.loader.dataset is prepared.loader.theirs.dataset
    assert copy.copy(prepared.loader).device == prepared.loader.device


def test_what_watches_a_prepared_model_sees_every_call(emulated):
    model, seen = net(), []
    prepare(Plan(precision="bf16"), model, adamw(model), [])
    call = vars(model)["_compiled_call_impl"]
    vars(model)["_compiled_call_impl"] = lambda x: seen.append(x) or call(x)
    for _ in range(3):
        model(torch.ones(1, 3, 8, 8))
    assert len(seen) == 3


def test_a_model_may_keep_its_own_weights_out_of_training():
    model = net()
    for weight in model[0].parameters():
        weight.requires_grad_(False)
    found = prepare(Plan(fused_optimizer=True), model, adamw(model[3:]), loader())
    assert found.effective.plan.fused_optimizer


# ---- compiled ----


@pytest.mark.parametrize("scope", ["model", "blocks", "step"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_compiled_code_learns_the_same_and_leaves_evaluation_and_small_batches_alone(
    scope, precision, emulated, monkeypatch
):
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    monkeypatch.setattr(compilation, "BACKEND", backend)
    monkeypatch.setattr(compilation, "_options", lambda plan, workload: {"backend": backend, "dynamic": None})
    plan = Plan(compile="default", compile_scope=scope, precision=precision, fused_optimizer=True)
    model = net()
    parts = prepare(plan, model, adamw(model), loader(shuffle=False, batch_size=16))  # 16, 16, 8
    torch.manual_seed(2)
    found = loop(*parts)
    graphs = len(seen)
    assert graphs >= 1 and fields(parts.effective) == ({"compile_scope"} if scope == "step" else set())
    with torch.no_grad():
        model.eval()(torch.ones(3, 3, 8, 8))
    assert len(seen) == graphs
    torch.compiler.reset()
    bare, _ = losses(Plan(precision=precision, fused_optimizer=True), shuffle=False, batch_size=16)
    assert found == pytest.approx(bare, rel=1e-5)


def test_a_failed_compilation_is_told_and_the_loop_goes_on(monkeypatch, capsys):
    def broken(graph, inputs):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(compilation, "_options", lambda plan, workload: {"backend": broken})
    model = net()
    parts = prepare(Plan(compile="default"), model, adamw(model), loader())
    assert parts.effective.plan.compile == "default"
    torch.manual_seed(2)
    assert loop(*parts) == losses(None)[0]
    assert parts.effective.plan.compile == parts.loader.effective.plan.compile == "off"
    assert "no compiler today" in capsys.readouterr().out


# ---- what cannot be applied is said ----


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("micro_batch", 4, "split the batch"),
        ("log_every", 50, "loss.item()"),
        ("validate_every", 0, "evaluate in"),
        ("on_nonfinite", "skip", "isfinite"),
        ("ranks", 2, "torchrun"),
        ("shards", True, "tar file"),
        ("decoder", "librosa", "reads the files"),
        ("features_on", "device", "your loop has the batch"),
        ("bucket", True, "batch_sampler"),
        ("worker_kind", "thread", "has processes only"),
    ],
)
def test_what_only_the_loop_can_do_says_how_and_strict_refuses_it(field, value, says, capsys):
    plan, model = Plan(**{field: value}), net()
    with pytest.raises(PlanError, match=f"strict allows no fallback: {field}: asked"):
        prepare(plan, model, adamw(model), loader(), strict=True)
    effective = prepare(plan, model, adamw(model), loader()).effective
    (found,) = effective.fallbacks
    assert (found.field, found.asked, found.got) == (field, value, getattr(Plan(), field)) and says in found.why
    assert effective.asked == plan and f"prepare: {found}" in capsys.readouterr().out


def flipped(picture, at):
    return picture.flip(-1) if random.random() < 0.02 else picture


@pytest.mark.parametrize("change", [flipped, lambda picture, at: picture + torch.rand(())], ids=["seldom", "always"])
def test_a_data_set_that_augments_at_random_is_not_kept(change):
    model = net()
    state = random.getstate(), torch.get_rng_state()
    effective = prepare(Plan(cache="ram"), model, adamw(model), loader(Pictures(change), num_workers=1)).effective
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    (found,) = effective.fallbacks
    assert "augments at random" in found.why and found.got == "off"
    assert effective.plan.workers == 1


def test_a_collate_function_that_changes_its_samples_gets_no_cache():
    def collate(samples):
        for picture, _ in samples:
            picture.mul_(2)
        return torch.utils.data.default_collate(samples)

    found, effective = losses(Plan(cache="ram"), collate_fn=collate)
    assert "collate_fn changes" in effective.fallbacks[0].why and found == losses(None, collate_fn=collate)[0]


def test_a_cache_that_has_no_room_is_not_begun(monkeypatch):
    monkeypatch.setattr(own_loader, "usable_ram_bytes", lambda: 10_000)
    assert "GB" in losses(Plan(cache="ram"))[1].fallbacks[0].why


def test_a_cache_stands_in_for_the_loaders_own_workers():
    effective = losses(Plan(cache="ram"), num_workers=2)[1]
    assert effective.plan.workers == 0 and fields(effective) == {"workers"}


def test_a_stream_is_not_doubled_by_workers():
    parts = (model := net()), adamw(model), DataLoader(Stream(), batch_size=8)
    prepared = prepare(Plan(workers=2, cache="ram", drop_last=True), *parts)
    assert fields(prepared.effective) == {"workers", "cache"} and "get_worker_info" in str(prepared.effective)
    assert sum(len(targets) for _, targets in prepared.loader) == 40


def test_what_is_no_dataloader_is_used_as_it_is():
    batches, model = [(torch.ones(8, 3, 8, 8), torch.zeros(8, dtype=torch.long))] * 3, net()
    prepared = prepare(Plan(workers=2, cache="ram", drop_last=True, precision="fp32"), model, adamw(model), batches)
    assert fields(prepared.effective) == {"workers", "cache", "drop_last"}
    assert all("a list makes its batches in its own way" in found.why for found in prepared.effective.fallbacks)
    assert len(prepared.loader) == 3 and len(loop(*prepared, epochs=1)) == 3


class Odd(BatchSampler):
    """Batches of 7 and 3 in turns."""

    def __init__(self):
        pass

    def __iter__(self):
        return iter([list(range(7)), list(range(7, 10))] * 2)

    def __len__(self):
        return 4


@pytest.mark.parametrize("plan", [{"cache": "ram"}, {"workers": 1}], ids=str)
def test_a_batch_sampler_of_ones_own_keeps_its_say(plan):
    model = net()
    own = DataLoader(Pictures(), batch_sampler=Odd())
    prepared = prepare(Plan(drop_last=True, **plan), model, adamw(model), own)
    assert [len(targets) for _, targets in prepared.loader] == [7, 3, 7, 3] and len(prepared.loader) == 4
    assert fields(prepared.effective) == {"drop_last"}


def test_drop_last_leaves_the_last_batch_out_but_never_the_only_one():
    model = net()
    own = loader(batch_size=16, drop_last=False)
    prepared = prepare(Plan(drop_last=True), model, adamw(model), own)
    assert len(prepared.loader) == 2 == len(list(prepared.loader))
    effective = losses(Plan(drop_last=True), batch_size=64)[1]
    assert "no batch would be left" in effective.fallbacks[0].why


class Pair(NamedTuple):
    first: torch.Tensor
    second: list


class Own:
    """A batch of somebody's own, which knows how to move."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Own(self.x.to(device))


def collate_odd(samples):
    pictures, targets = torch.utils.data.default_collate(samples)
    return {"pair": Pair(pictures, [targets, "a word"]), "own": Own(targets)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", [{}, {"prefetch": True}, {"workers": 2, "pin_memory": True}], ids=str)
def test_whatever_a_batch_is_made_of_arrives_on_the_device(plan, device):
    model = net(device)
    prepared = prepare(Plan(**plan), model, adamw(model), loader(collate_fn=collate_odd, shuffle=False))
    batches = list(prepared.loader)
    assert len(batches) == len(prepared.loader) == 5
    for number, batch in enumerate(batches):
        pictures, (targets, word) = batch["pair"]
        assert pictures.device == targets.device == batch["own"].x.device == next(model.parameters()).device
        assert word == "a word" and torch.equal(targets, batch["own"].x)
        assert torch.equal(pictures[0].cpu(), Pictures()[8 * number][0])


def test_auto_leaves_the_loader_its_own_workers_and_says_so():
    effective = losses(Plan(workers="auto"), num_workers=1)[1]
    (told,) = effective.fallbacks
    assert effective.plan.workers == told.got == 1 and "give a number" in told.why


# ---- bad input ----


def frozen():
    model = net()
    for weight in model.parameters():
        weight.requires_grad_(False)
    return model


def split():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        (lambda: (net(), adamw(net()), loader()), {}, "the optimizer holds no parameter of the model"),
        (lambda: ((model := frozen()), adamw(model), loader()), {}, "the model has no parameter to train"),
        (
            lambda: ((model := net()), adamw(model), loader()),
            {"device": "cuda:7"},
            "the model is on cpu, and cuda:7 was",
        ),
        (lambda: ((model := split()), adamw(model), loader()), {}, "the model is on cpu, meta, and cpu was asked"),
        (lambda: ((model := net()), adamw(model), 3), {}, "int is no Iterable"),
        (lambda: (adamw(model := net()), model, loader()), {}, "AdamW is no Module"),
        (
            lambda: (*prepare(Plan(precision="bf16"), (model := net()), adamw(model), [])[:2], []),
            {},
            "prepared already",
        ),
    ],
    ids=["foreign", "frozen", "elsewhere", "scattered", "no loader", "order", "twice"],
)
def test_parts_that_do_not_belong_together_are_one_sentence(parts, options, says, emulated):
    with pytest.raises(UsageError, match=says):
        prepare(Plan(), *parts(), **options)


def test_what_a_model_or_an_optimizer_cannot_do_is_said():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 2))
    plan = Plan(
        channels_last=True, fused_optimizer=True, checkpointing="blocks", compile="default", allocator="expandable"
    )
    optimizer = torch.optim.RMSprop(model.parameters())
    before = str(optimizer)
    with pytest.raises(PlanError, match="strict"):
        prepare(plan, model, optimizer, [], strict=True)
    assert str(optimizer) == before and "_compiled_call_impl" not in vars(model)
    model.compile()
    effective = prepare(plan, model, optimizer, []).effective
    on_cpu = {"allocator"}
    assert fields(effective) == {"channels_last", "fused_optimizer", "checkpointing", "compile"} | on_cpu
    assert effective.plan == Plan()
