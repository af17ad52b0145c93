"""What the machine is, what it can do and why not, and its measured ceilings."""

import math
import os
from dataclasses import replace

import pytest
import torch

from speedkit import hardware
from speedkit.ceilings import ceilings
from speedkit.hardware import CAPABILITIES, Hardware, this_machine

GPU = Hardware(device=torch.device("cuda"), gpu_count=1, triton=True, compiler="/usr/bin/gcc", python_headers=True)
T4 = replace(GPU, gpu="Tesla T4", compute_capability=(7, 5))
A100 = replace(GPU, gpu="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0))
H100 = replace(GPU, gpu="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))
APPLE = Hardware(device=torch.device("mps"))
CPU = Hardware(compiler="/usr/bin/g++", python_headers=True)
ON_EVERY_GPU = {"cuda_graphs", "pin_memory"}


@pytest.mark.parametrize(
    ("machine", "can"),
    [
        (T4, ON_EVERY_GPU | {"fp16", "compile"}),
        (A100, ON_EVERY_GPU | {"fp16", "compile", "bf16", "tf32", "flash_attention"}),
        (H100, set(CAPABILITIES)),
        (APPLE, set()),
        (CPU, {"compile", "flash_attention"}),
        (replace(CPU, cpu_flags=("amx_bf16",)), {"compile", "flash_attention", "bf16"}),
    ],
)
def test_capabilities_of_known_machines(machine, can):
    assert {name for name in CAPABILITIES if machine.supports(name)} == can
    reasons = {name: machine.why_not(name) for name in CAPABILITIES if name not in can}
    assert all(reason.startswith(f"{name} needs ") for name, reason in reasons.items())
    assert machine.as_dict()["cannot"] == reasons


@pytest.mark.parametrize(
    ("machine", "capability", "words"),
    [
        (T4, "bf16", "compute capability 8.0, Ampere, or newer; the device is Tesla T4"),
        (APPLE, "tf32", "the device is this MPS"),
        (replace(H100, triton=False), "compile", "triton"),
        (replace(H100, compiler=""), "compile", "C compiler"),
        (Hardware(), "compile", "C++ compiler"),
        (replace(CPU, python_headers=False), "compile", "python3-dev"),
        (CPU, "librosa", "librosa needs the package librosa"),
    ],
)
def test_what_is_missing_is_named(machine, capability, words):
    assert words in machine.why_not(capability)


def test_a_gpu_is_named_with_how_to_choose_another_and_a_small_one_with_how_to_make_room():
    [choice] = replace(T4, gpu_count=2, device=torch.device("cuda:0"), gpu_memory_bytes=16 << 30).advice
    assert "cuda:0 of 2 GPUs is used" in choice and "CUDA_VISIBLE_DEVICES" in choice and "--ranks 2" in choice
    assert "less than 4 GB" in replace(T4, gpu_memory_bytes=2 << 30).advice[1] and CPU.advice == []


def test_container_limits_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)  # a container sees its own group as the root
    assert hardware.usable_ram_bytes() > 1048576
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert hardware.usable_cores() == 1 and hardware.usable_ram_bytes() == 1048576


def test_this_machine_knows_itself():
    machine = this_machine("cpu")
    assert machine.device == torch.device("cpu") and 1 <= machine.cores <= os.cpu_count()
    assert machine.ram_bytes and machine.cpu and machine.torch_version == torch.__version__
    no_gpu = "00000000-0000-0000-0000-000000000000"
    assert set(hardware.nvml_facts(no_gpu, "driver", "power_w")) <= {"driver"}


def test_ceilings_are_measured_and_kept_per_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("speedkit.ceilings.BUDGET_S", 0.01)
    machine = this_machine("cpu")
    measured = ceilings(machine)
    assert measured.keys() >= {"matmul_fp32", "memory_bandwidth", "memcpy"} and "matmul_fp8" not in measured
    assert ("matmul_bf16" in measured) == machine.supports("bf16")
    assert all(0 < ceiling.median <= ceiling.value < math.inf for ceiling in measured.values())
    assert "TFLOP/s (median" in str(measured["matmul_fp32"])
    [path] = tmp_path.iterdir()
    assert ceilings(machine) == measured
    path.write_text("{ not JSON")
    assert ceilings(machine) != measured
