"""What the machine is, what it can do and why not, and its measured ceilings."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from speedkit import ceilings as ceilings_module
from speedkit import hardware
from speedkit.ceilings import ceilings
from speedkit.hardware import CAPABILITIES, Hardware, this_machine

GPU = Hardware(device=torch.device("cuda"), gpu_count=1, triton=True, compiler="/usr/bin/gcc", python_headers=True)
T4 = replace(GPU, gpu="Tesla T4", compute_capability=(7, 5))
A100 = replace(GPU, gpu="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0))
H100 = replace(GPU, gpu="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))
P100 = replace(GPU, gpu="P100", compute_capability=(6, 0))
UNKNOWN = replace(GPU, gpu="Some GPU")
APPLE = Hardware(device=torch.device("mps"))
CPU = Hardware(compiler="/usr/bin/g++", python_headers=True)
ON_EVERY_GPU = {"cuda_graphs", "pin_memory"}


@pytest.mark.parametrize(
    ("machine", "can"),
    [
        (T4, ON_EVERY_GPU | {"fp16", "compile"}),
        (A100, ON_EVERY_GPU | {"fp16", "compile", "bf16", "tf32", "flash_attention"}),
        (H100, set(CAPABILITIES)),
        (P100, ON_EVERY_GPU),
        (UNKNOWN, ON_EVERY_GPU),
        (APPLE, set()),
        (CPU, {"compile", "flash_attention"}),
        (replace(CPU, cpu_flags=("amx_bf16",)), {"compile", "flash_attention", "bf16"}),
    ],
)
def test_capabilities_of_known_machines(machine, can):
    assert {name for name in CAPABILITIES if machine.supports(name)} == can
    for name in CAPABILITIES:
        reason = machine.why_not(name)
        assert machine.supports(name) == (reason == "")
        assert not reason or reason.startswith(f"{name} needs ")


@pytest.mark.parametrize(
    ("machine", "capability", "says"),
    [
        (T4, "bf16", "compute capability 8.0, Ampere, or newer; the device is Tesla T4"),
        (A100, "fp8", "Ada with FP8 tensor cores"),
        (APPLE, "tf32", "the device is this MPS"),
        (replace(H100, flash_attention=False), "flash_attention", "not in this build"),
        (replace(H100, triton=False), "compile", "triton"),
        (replace(H100, compiler=""), "compile", "C compiler"),
        (Hardware(), "compile", "C++ compiler"),
        (replace(CPU, python_headers=False), "compile", "python3-dev"),
        (CPU, "librosa", "librosa needs the package librosa"),
    ],
)
def test_what_is_missing_is_named_with_what_to_use(machine, capability, says):
    assert says in machine.why_not(capability)


def test_container_limits_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)  # a container sees its own group as the root
    assert hardware.usable_ram_bytes() > 1048576
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert hardware.usable_cores() == 1 and hardware.usable_ram_bytes() == 1048576


def test_this_machine_knows_itself():
    machine = this_machine("cpu")
    assert machine.device == torch.device("cpu") and 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.ram_bytes and machine.cpu and machine.torch_version == torch.__version__
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    assert this_machine().device.type == next(kind for kind, there in kinds.items() if there)


def test_no_compiler_on_the_path_means_no_compile():
    code = "from speedkit.hardware import this_machine; print(this_machine('cpu').why_not('compile'))"
    environment = {**os.environ, "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert "needs a C++ compiler" in done.stdout


def test_of_a_gpu_that_is_not_there_nothing_is_told():
    assert set(hardware.nvml_facts("00000000-0000-0000-0000-000000000000", "driver", "power_w")) <= {"driver"}


def test_ceilings_are_measured_numbers_and_kept_per_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    machine = this_machine("cpu")
    path = tmp_path / f"ceilings-{ceilings_module.SCHEMA}-{machine.fingerprint()}.json"
    path.write_text("{ not JSON")
    found = ceilings(machine)
    assert found.keys() >= {"matmul_fp32", "memory_bandwidth", "memcpy"} and "matmul_fp8" not in found
    assert ("matmul_bf16" in found) == machine.supports("bf16")
    for name, ceiling in found.items():
        assert ceiling.name == name and ceiling.how and ceiling.unit in ("FLOP/s", "bytes/s")
        assert 0 < ceiling.median <= ceiling.value < math.inf
    assert "TFLOP/s (median" in str(found["matmul_fp32"])
    assert list(tmp_path.iterdir()) == [path] and ceilings(machine) == found
