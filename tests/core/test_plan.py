"""Recipe and Plan: what they take, what they say about the rest, and what a machine makes of a plan."""

import dataclasses
import functools
import itertools

import pytest
import torch
from tiny import CPU, CPU_BF16, T4, points, trained
from tiny import H100 as GPU
from torch.optim import lr_scheduler

from speedkit.config import from_mapping, from_yaml, to_yaml
from speedkit.errors import PlanError
from speedkit.fallbacks import resolve
from speedkit.machine import this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe, learning_rates, steps_per_epoch


@pytest.mark.parametrize("settings", [Plan.fast(GPU), Recipe(epochs=None, steps=5)])
def test_settings_survive_yaml(tmp_path, settings):
    path = tmp_path / "plan.yaml"
    path.write_text(to_yaml(settings))
    assert from_yaml(type(settings), path) == settings


def test_texts_stand_for_values(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("cache: off\nlog_every: 20\nmicro_batch: none\nworkers: '3'\nchannels_last: 'yes'\nbucket: false\n")
    assert from_yaml(Plan, path) == Plan(log_every=20, workers=3, channels_last=True)
    given = {"learning_rate": "1e-3", "steps": "5", "epochs": None}
    assert from_mapping(Recipe, given) == Recipe(learning_rate=1e-3, epochs=None, steps=5)


@pytest.mark.parametrize("values", [{"workers": True}, {"channels_last": 1}, {"log_every": "8"}])
def test_values_are_never_bent_to_fit(values):
    with pytest.raises(PlanError, match="is not possible; it takes "):
        Plan(**values)


# Each line holds the one before nine times: nine to the eighth in all.
BOMB = "a: &a x\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "line 2 is no `field: value`: a field has one value"),
        ("workers: {a: 1}", "line 1 is no"),
        ("? [1]\n: 2", "line 1 is no"),
        ("workers: 1\nworkers: 2", "workers stands there twice"),
        ("self: 1", "'self' is not a field of Plan"),
        ("workers: " + "x" * 400, "workers='xxx"),
        ("[" * 5000, "maximum recursion depth|it must hold"),
    ],
    ids=["bomb", "mapping", "key", "twice", "self", "long", "deep"],
)
def test_what_is_no_plan_is_one_short_sentence(tmp_path, text, why):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=why) as caught:
        from_yaml(Plan, path)
    assert len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize(("share", "steps"), [(0.5, [3, 6, 9, 12]), (0.01, [*range(1, 13)])])
def test_a_share_of_an_epoch_says_when_to_evaluate(share, steps, tmp_path):
    (tmp_path / "plan.yaml").write_text(f"validate_every: {share}\n")
    history = trained(points(epochs=2), plan=from_yaml(Plan, tmp_path / "plan.yaml"))
    assert [row["step"] for row in history.evaluations] == steps


def test_recipe_counts_its_steps():
    assert Recipe(epochs=3, batch_size=32).total_steps(100) == 12
    assert Recipe(epochs=3, batch_size=32, drop_last=True).total_steps(100) == 9
    assert steps_per_epoch(5, 32, drop_last=True) == 1  # a set smaller than a batch is one small batch


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("onecycle", functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=51, cycle_momentum=False)),
        ("cosine", functools.partial(lr_scheduler.CosineAnnealingLR, T_max=50)),
    ],
)
def test_schedules_are_those_of_pytorch(schedule, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    reference, expected = make(optimizer), []
    for _ in range(51):
        expected += reference.get_last_lr()
        optimizer.step()
        reference.step()
    recipe = Recipe(schedule=schedule, learning_rate=0.1)
    assert learning_rates(recipe, 51) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert 0 < learning_rates(recipe, 1)[0] <= 0.1


@pytest.mark.parametrize("hardware", [CPU, CPU_BF16, GPU, T4])
def test_plain_plan_resolves_to_itself_everywhere_and_others_after_one_pass(hardware):
    effective = resolve(Plan(), hardware)
    assert effective.plan == Plan() and not effective.fallbacks
    for plan in (Plan.careful(hardware), Plan.fast(hardware)):
        once = resolve(plan, hardware).plan
        assert resolve(once, hardware).plan == once


DATA = points()
RAGGED = {"workload": dataclasses.replace(DATA, length=lambda item: 0)}
SLICES = {"workload": dataclasses.replace(DATA, cacheable=False)}
NOISY = {"workload": dataclasses.replace(DATA, augment_waveform=lambda waveform, generator: waveform)}
GRAPHS = {"compile": "reduce-overhead"}
NO_GRAPHS = {"compile": "default"}
OF_CUDA = ("pin_memory", "prefetch", "cudnn_benchmark")
MANY = dataclasses.replace(GPU, gpu_count=8)
SHARDED = {"ranks": 2, "strategy": "fsdp", "compile": "default", "channels_last": True, "precision": "fp8"}
# What is asked, on what, with what else known: what comes instead, and words of the reason.
FALLBACKS = [
    ({"precision": "fp8"}, CPU_BF16, {}, {"precision": "bf16"}, "FP8 tensor cores"),
    ({"precision": "bf16"}, T4, {}, {"precision": "fp16", "fused_optimizer": True}, "compute capability 8.0"),
    (NO_GRAPHS, dataclasses.replace(CPU, compiler=""), {}, {"compile": "off"}, "C++ compiler"),
    (GRAPHS, CPU, {}, NO_GRAPHS, "CUDA GPU"),
    ({"attention": "cudnn"}, CPU, {}, {"attention": "auto"}, "cudnn_attention needs a CUDA GPU"),
    ({"attention": "varlen"}, GPU, {}, {"attention": "auto"}, "varlen takes 16 bits"),
    ({"attention": "varlen", "precision": "bf16"}, GPU, {}, {}, ""),
    ({"allocator": "keep"}, CPU, {}, {"allocator": "default"}, "needs glibc"),
    ({"allocator": "keep"}, dataclasses.replace(CPU, mallopt=True), {}, {}, ""),
    (dict.fromkeys(OF_CUDA, True), CPU, {}, dict.fromkeys(OF_CUDA, False), "CUDA GPU"),
    ({"allocator": "expandable"}, CPU, {}, {"allocator": "default"}, "CUDA GPU"),
    ({"prefetch": True}, GPU, {}, {"pin_memory": True}, "page-locked"),
    ({"cache": "device", "workers": 2}, CPU, {}, {"cache": "ram", "workers": 0}, "memory is the RAM"),
    ({"workers": 150}, CPU, {}, {"workers": 2}, "the 2 cores"),
    ({"workers": 16}, CPU, {}, {}, ""),
    ({"workers": 2}, dataclasses.replace(CPU, operating_system="win32"), {}, {"workers": 0}, "WSL2"),
    ({"cache": "ram", "features_on": "device"}, GPU, {}, {"features_on": "cpu"}, "holds features"),
    # The data.
    ({"cache": "ram"}, CPU, SLICES, {"cache": "off"}, "slices"),
    ({"bucket": True}, CPU, {"workload": DATA}, {"bucket": False}, "nothing is padded"),
    ({"features_on": "device"}, CPU, RAGGED, {"features_on": "cpu"}, "lengths differ"),
    ({"cache": "ram", "cache_of": "waveform"}, CPU, RAGGED, {"cache_of": "features"}, "lengths"),
    ({}, CPU, NOISY, {"features_on": "cpu"}, "augment_waveform is skipped"),
    ({"cudnn_benchmark": True}, GPU, RAGGED, {"cudnn_benchmark": False}, "bucket makes them few"),
    ({"compile": "max-autotune-no-cudagraphs"}, GPU, RAGGED, NO_GRAPHS, "bucket makes them few"),
    ({"precision": "bf16"}, GPU, RAGGED, {"attention": "flash"}, "cuDNN plans attention by shape"),
    ({"precision": "bf16", "bucket": True}, GPU, RAGGED, {}, ""),
    # CUDA graphs.
    (GRAPHS, GPU, RAGGED, NO_GRAPHS, "bucket makes them few"),
    (GRAPHS | {"bucket": True}, GPU, RAGGED, {}, ""),
    (GRAPHS | {"micro_batch": 16}, GPU, {"batch_size": 32}, NO_GRAPHS, "CUDA graph's replay"),
    (GRAPHS | {"micro_batch": "auto"}, GPU, {}, NO_GRAPHS, "CUDA graph's replay"),
    (GRAPHS | {"micro_batch": 32}, GPU, {"batch_size": 32}, {}, ""),
    # Several ranks.
    (GRAPHS | {"ranks": 2}, MANY, {}, NO_GRAPHS | {"compile_scope": "blocks"}, "where ddp does not look"),
    (NO_GRAPHS | {"ranks": 2}, MANY, {}, {"compile_scope": "blocks"}, "has all at its end"),
    (SHARDED, MANY, {}, {"compile": "off", "channels_last": False, "precision": "bf16"}, "fsdp ranks"),
]


@pytest.mark.parametrize("case", FALLBACKS, ids=lambda case: ",".join(case[0]))
def test_a_plan_falls_back_to_what_machine_and_data_can_do_with_the_reason(case):
    asked, hardware, more, instead, why = case
    effective, requested = resolve(Plan(**asked), hardware, **more), vars(Plan(**asked))
    rows = [(fallback.field, fallback.asked, fallback.got) for fallback in effective.fallbacks]
    assert sorted(rows) == sorted((field, requested[field], got) for field, got in instead.items())
    assert effective.plan == Plan(**asked | instead)
    assert why in " ".join(fallback.why for fallback in effective.fallbacks)


def test_a_plan_s_name_is_as_good_as_the_plan(tmp_path):
    (tmp_path / "plan.yaml").write_text("workers: 3\n")
    named = {"baseline": Plan(), "careful": Plan.careful(GPU), "fast": Plan.fast(GPU)}
    for name, plan in (named | {str(tmp_path / "plan.yaml"): Plan(workers=3)}).items():
        assert resolve(name, GPU).asked == plan
    assert trained(points(epochs=1), plan="careful").effective.asked == Plan.careful(this_machine("cpu"))
    with pytest.raises(
        PlanError, match=r"there is no plan 'fats' \(did you mean fast\?\): take baseline, careful, fast"
    ):
        resolve("fats")


def test_an_effective_plan_is_printed_as_a_table_of_short_lines():
    lines = str(resolve(Plan(precision="fp8", workers=2, compile="max-autotune-no-cudagraphs"), CPU_BF16)).splitlines()
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in lines if line[0] != " "}
    assert rows["field"] == ["asked", "got", "why"] and rows["workers"] == ["2", "2", "as asked"]
    assert rows["precision"][:2] == ["fp8", "bf16"] and rows["precision"][2].startswith("fp8 needs")
    assert rows.keys() == {"field", "precision", "workers", "compile"}, "no other field"
    assert max(map(len, lines)) <= 110 and "FP8 tensor cores" in " ".join(" ".join(lines).split())


def test_strict_refuses_a_fallback_and_ranks_need_a_gpu_each():
    with pytest.raises(PlanError, match="strict=True allows no fallback: precision: asked fp8, got default: fp8 needs"):
        resolve(Plan(precision="fp8"), CPU, strict=True)
    with pytest.raises(PlanError, match="ranks=2 takes"):
        resolve(Plan(ranks=2), GPU)


def test_ranks_do_not_share_the_gpu_that_a_device_names(monkeypatch):
    second = dataclasses.replace(GPU, device=torch.device("cuda:1"), gpu_count=2)
    with pytest.raises(PlanError, match=r'device="cuda:1" is one GPU.*cuda:0 to cuda:1'):
        resolve(Plan(ranks=2), second)
    resolve(Plan(ranks=2), dataclasses.replace(second, device=torch.device("cuda")))
    monkeypatch.setenv("LOCAL_RANK", "1")  # of torchrun, to the rank whose GPU this is
    resolve(Plan(ranks=2), second)
