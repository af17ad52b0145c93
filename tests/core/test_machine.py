"""What the machine is, what it can do and why not."""

import tempfile
from dataclasses import replace

import pytest
import torch
from tiny import CPU, CPU_BF16, H100, T4

from speedkit import machine
from speedkit.errors import UsageError
from speedkit.machine import CAPABILITIES, Hardware, this_machine

A100 = replace(H100, gpu="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0))
APPLE = Hardware(device=torch.device("mps"))
ON_EVERY_GPU = {"cuda_graphs", "pin_memory"}


@pytest.mark.parametrize(
    ("machine", "can"),
    [
        (T4, ON_EVERY_GPU | {"fp16", "compile"}),
        (A100, ON_EVERY_GPU | {"fp16", "compile", "bf16", "tf32", "flash_attention"}),
        (H100, set(CAPABILITIES)),
        (APPLE, set()),
        (CPU, {"compile", "flash_attention"}),
        (CPU_BF16, {"compile", "flash_attention", "bf16"}),
    ],
)
def test_capabilities_of_known_machines(machine, can):
    assert {name for name in CAPABILITIES if machine.supports(name)} == can
    reasons = {name: machine.why_not(name) for name in CAPABILITIES if name not in can}
    assert all(reason.startswith(f"{name} needs ") for name, reason in reasons.items())
    assert machine.as_dict()["cannot"] == reasons


def test_what_is_missing_is_named():
    assert "the device is Tesla T4" in T4.why_not("bf16") and "triton" in replace(H100, triton=False).why_not("compile")
    assert "C compiler" in replace(H100, compiler="").why_not("compile")
    assert "python3-dev" in replace(CPU, python_headers=False).why_not("compile")
    assert "needs the package torchcodec" in CPU.why_not("torchcodec")


def test_container_limits_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)  # a container sees its own group as the root
    assert machine.usable_ram_bytes() > 1048576
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert machine.usable_cores() == 1 and machine.usable_ram_bytes() == 1048576


def test_this_machine_knows_itself():
    here = this_machine("cpu")
    assert here.cores and here.ram_bytes and here.cpu and here.torch_version


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here is used")
@pytest.mark.parametrize(
    ("driver", "built_for", "says"),
    [
        ("535.183.01", "13.0", "driver 580 or newer"),
        ("470.256.02", "12.8", "driver 525 or newer"),
        ("580.65.06", "13.0", "torch.cuda.init"),
        (None, "13.0", "driver unknown"),  # NVML cannot be loaded, as in a container
        ("580.65.06", None, "built without CUDA"),
    ],
)
def test_a_gpu_that_pytorch_cannot_use_is_no_silent_cpu(driver, built_for, says, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: (driver, 1) if driver else ("", 0))
    if not driver:
        (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(machine, "NVIDIA_DEVICE", tmp_path / "nvidia0")
    with pytest.warns(UserWarning, match=driver or "unknown") as warned:
        assert this_machine().device.type == "cpu"
    assert says in str(warned[0].message) and machine.unusable_gpu() == str(warned[0].message)
    with pytest.raises(UsageError, match=f"this machine has cpu.*{says.split()[0]}"):
        this_machine("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nobody wants one
    assert machine.unusable_gpu() == ""


@pytest.mark.parametrize("home", ["/", "/no/such/home"])
def test_without_a_home_caches_are_in_the_temporary_folder(home, monkeypatch):
    monkeypatch.delenv("SPEEDKIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", home)
    with pytest.warns(UserWarning, match="no home"):
        assert machine.cache_root().is_relative_to(tempfile.gettempdir())
