"""Recipe and Plan: what they take, what they say about the rest, and what a machine makes of a plan."""

import dataclasses

import pytest
import torch
import yaml

from speedkit.elsewhere import FORMERLY
from speedkit.errors import PlanError
from speedkit.hardware import Hardware
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe, learning_rates, steps_per_epoch
from speedkit.settings import described, from_mapping, from_yaml, parse, to_yaml

CPU = Hardware(device=torch.device("cpu"), cpu="Plain CPU", cores=2, cpu_flags=(), compiler="g++", python_headers=True)
CPU_BF16 = dataclasses.replace(CPU, cpu_flags=("avx512_bf16",))
GPU = Hardware(
    device=torch.device("cuda"),
    gpu="H100",
    gpu_count=1,
    compute_capability=(9, 0),
    cores=8,
    triton=True,
    compiler="/usr/bin/gcc",
    python_headers=True,
)
T4 = dataclasses.replace(GPU, gpu="T4", compute_capability=(7, 5))


def test_plain_plan_has_nothing_on_and_resolves_to_itself_everywhere():
    for hardware in (CPU, CPU_BF16, GPU, T4):
        effective = resolve(Plan(), hardware)
        assert effective.plan == Plan() and not effective.fallbacks


@pytest.mark.parametrize("settings", [Plan(), Plan.careful(CPU), Plan.fast(GPU), Recipe(epochs=None, steps=5)])
def test_settings_survive_yaml(tmp_path, settings):
    path = tmp_path / "plan.yaml"
    path.write_text(to_yaml(settings))
    assert from_yaml(type(settings), path) == settings
    assert all("#" in line for line in path.read_text().splitlines())


def test_bare_off_in_yaml_is_the_word_off(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("cache: off\ncompile: off\nlog_every: 20\n")
    assert from_yaml(Plan, path, FORMERLY) == Plan(log_every=20)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"precison": "bf16"}, "did you mean precision"),
        ({"num_workers": 4}, "here that is workers"),
        ({"use_amp": True}, "here that is precision"),
        ({"gradient_accumulation_steps": 2}, "accumulation follows from the recipe's batch_size"),
        ({"lr": 0.1}, "a field of the Recipe"),
        ({"precision": "bf61"}, "did you mean bf16"),
        ({"precision": "bf16 "[:3]}, "fp32 | tf32 | bf16"),
        ({"workers": -1}, "an integer from 0"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"workers": True}, "workers=True"),
        ({"channels_last": 1}, "channels_last=1"),
        ({"log_every": 0}, "an integer from 1"),
        ({"micro_batch": float("nan")}, "micro_batch=nan"),
    ],
)
def test_wrong_names_and_values_say_what_is_right(values, says):
    with pytest.raises(PlanError, match=says.replace("|", r"\|").replace("(", r"\(")):
        from_mapping(Plan, values, FORMERLY)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "", "\x00"])
def test_a_broken_plan_file_is_named(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"broken\.yaml"):
        from_yaml(Plan, path)


def test_values_typed_on_a_command_line():
    about = {item.name: item for item in described(Plan)}
    assert parse(about["micro_batch"], "8") == 8
    assert parse(about["micro_batch"], "none") is None
    assert parse(about["workers"], "auto") == "auto"
    assert parse(about["channels_last"], "true") is True
    assert parse({item.name: item for item in described(Recipe)}["learning_rate"], "1e-3") == 1e-3
    with pytest.raises(PlanError, match="workers='many'"):
        parse(about["workers"], "many")


def test_recipe_wants_epochs_or_steps():
    with pytest.raises(PlanError, match="epochs or steps"):
        Recipe(epochs=3, steps=10)
    with pytest.raises(PlanError, match="epochs or steps"):
        Recipe(epochs=None)
    assert Recipe(epochs=3, batch_size=32).total_steps(100, drop_last=False) == 12
    assert Recipe(epochs=3, batch_size=32).total_steps(100, drop_last=True) == 9
    assert steps_per_epoch(5, 32, drop_last=True) == 1


@pytest.mark.parametrize("schedule", ["constant", "onecycle", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 200])
def test_schedules_stay_within_the_peak(schedule, steps):
    rates = learning_rates(Recipe(schedule=schedule, learning_rate=0.1), steps)
    assert len(rates) == steps and all(0 <= rate <= 0.1 + 1e-12 for rate in rates)


def test_onecycle_is_the_curve_of_pytorch():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50, cycle_momentum=False)
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < 50:
            reference.step()
    assert learning_rates(Recipe(learning_rate=0.1), 50) == pytest.approx(expected, rel=1e-6)


def fields_of(effective):
    return {item.field: item.got for item in effective.fallbacks}


def test_fp8_falls_back_to_what_the_machine_has_with_every_reason():
    assert fields_of(resolve(Plan(precision="fp8"), CPU_BF16)) == {"precision": "bf16"}
    effective = resolve(Plan(precision="fp8"), CPU)
    assert fields_of(effective) == {"precision": "fp32"}
    (fallback,) = effective.fallbacks
    assert fallback.asked == "fp8" and "FP8 tensor cores" in fallback.why and "bf16" in fallback.why


def test_t4_takes_fp16_for_bf16_and_the_fused_optimizer_with_it():
    effective = resolve(Plan(precision="bf16"), T4)
    assert fields_of(effective) == {"precision": "fp16", "fused_optimizer": True}
    assert "emulates" in effective.fallbacks[0].why


def test_a_cpu_refuses_what_only_a_gpu_has():
    asked = Plan(precision="tf32", compile="reduce-overhead", pin_memory=True, cache="device", workers=2)
    effective = resolve(asked, CPU)
    assert fields_of(effective) == {
        "precision": "fp32",
        "compile": "default",
        "pin_memory": False,
        "cache": "ram",
        "workers": 0,
    }
    assert all(item.why for item in effective.fallbacks)


def test_no_compiler_means_no_compile_and_says_so():
    (fallback,) = resolve(Plan(compile="default"), dataclasses.replace(CPU, compiler="")).fallbacks
    assert fallback.got == "off" and "C++ compiler" in fallback.why


def test_strict_makes_a_fallback_an_error():
    with pytest.raises(PlanError, match=r"--strict.*pin_memory"):
        resolve(Plan(pin_memory=True), CPU, strict=True)


def test_presets_resolve_on_every_machine():
    for hardware in (CPU, CPU_BF16, GPU, T4):
        for plan in (Plan.careful(hardware), Plan.fast(hardware)):
            yaml.safe_load(to_yaml(resolve(plan, hardware).plan))
