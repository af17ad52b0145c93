"""What the machine is, what it can do and why not, and its measured ceilings."""

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from speedkit import ceilings as ceilings_module
from speedkit import hardware
from speedkit.ceilings import ceilings, left_out
from speedkit.errors import UsageError
from speedkit.hardware import CAPABILITIES, Hardware, cache_root, this_machine

GPU = Hardware(
    device=torch.device("cuda"), gpu_count=1, triton=True, compiler="/usr/bin/gcc", python_headers=True, cpu="a CPU"
)
T4 = replace(GPU, gpu="Tesla T4", compute_capability=(7, 5))
A100 = replace(GPU, gpu="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0))
H100 = replace(GPU, gpu="NVIDIA H100 80GB HBM3", compute_capability=(9, 0))


def can(machine):
    return {name for name in CAPABILITIES if machine.supports(name)}


def test_capabilities_of_known_gpus():
    everywhere = {"fp16", "cuda_graphs", "compile", "pin_memory"}
    assert can(T4) == everywhere
    assert can(A100) == everywhere | {"bf16", "tf32", "flash_attention"}
    assert can(H100) == set(CAPABILITIES)
    assert can(replace(GPU, gpu="P100", compute_capability=(6, 0))) == {"cuda_graphs", "pin_memory"}


def test_a_t4_emulates_bf16_and_says_what_to_use():
    reason = T4.why_not("bf16")
    assert "Tesla T4 has 7.5 and only emulates it" in reason
    assert reason.endswith('Use precision "fp16".')
    assert 'A100-SXM4-40GB has 8.0. Use precision "bf16".' in A100.why_not("fp8")


def test_an_unknown_gpu_is_not_guessed():
    unknown = replace(GPU, gpu="Some GPU")
    assert "Some GPU is none, or does not tell" in unknown.why_not("bf16")
    assert can(unknown) == {"cuda_graphs", "pin_memory"}
    apple = Hardware(device=torch.device("mps"))
    assert not can(apple)
    assert "NVIDIA" in apple.why_not("tf32") and "this MPS" in apple.why_not("tf32")


def test_flash_attention_is_what_this_build_has():
    assert "not in this build" in replace(H100, flash_attention=False).why_not("flash_attention")
    query = torch.ones(1, 2, 16, 32, dtype=torch.bfloat16, requires_grad=True)  # [B, heads, T, D]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        functional.scaled_dot_product_attention(query, query, query).sum().backward()  # raises where there is none
    assert this_machine("cpu").supports("flash_attention") and query.grad is not None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_cpu_that_has_a_precision_trains_in_it(precision):
    if not this_machine("cpu").supports(precision):
        pytest.skip(this_machine("cpu").why_not(precision))
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        outputs = net(torch.ones(2, 3, 8, 8))  # [B, 5]
    outputs.float().mean().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters())


def test_compile_says_what_is_missing():
    assert "triton" in replace(H100, triton=False).why_not("compile")
    assert "C compiler" in replace(H100, compiler="").why_not("compile")
    assert "Python.h" in replace(H100, python_headers=False).why_not("compile")
    assert "C++ compiler" in Hardware().why_not("compile")
    assert "python3-dev" in Hardware(compiler="/usr/bin/g++").why_not("compile")
    assert Hardware(compiler="/usr/bin/g++", python_headers=True).supports("compile")


@pytest.mark.parametrize("flags", [("amx_bf16",), ("avx512_bf16",), ()])
def test_bf16_on_a_cpu_needs_its_instructions(flags):
    assert Hardware(cpu_flags=flags).supports("bf16") is bool(flags)


def test_a_reason_never_is_empty_where_a_capability_is_missing():
    for machine in (this_machine("cpu"), Hardware(), Hardware(device=torch.device("mps")), T4, A100, GPU):
        for name in CAPABILITIES:
            reason = machine.why_not(name)
            assert machine.supports(name) == (reason == "")
            assert not reason or (reason.startswith(name) and ". " in reason and reason.endswith("."))


def test_unknown_capability_names_the_nearest():
    with pytest.raises(UsageError, match=r'"bf61" \(did you mean bf16\?\)'):
        Hardware().supports("bf61")


def test_container_limits_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)  # a container sees its own group as the root
    assert hardware.usable_ram_bytes() > 1048576
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert hardware.usable_cores() == 1
    assert hardware.usable_ram_bytes() == 1048576


def test_this_machine_knows_itself():
    machine = this_machine("cpu")
    assert machine.device == torch.device("cpu")
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.ram_bytes and machine.cpu and machine.torch_version == torch.__version__
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    assert this_machine().device.type == next(kind for kind, there in kinds.items() if there)
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


def test_threads_are_those_of_now():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert this_machine("cpu").threads == before + 1
    finally:
        torch.set_num_threads(before)


def test_facts_are_json_with_units_in_their_names():
    facts = json.loads(json.dumps(this_machine("cpu").as_dict(), allow_nan=False))
    assert facts["device"] == "cpu" and facts["ram_bytes"] > 0
    assert set(facts["can"]) | set(facts["cannot"]) == set(CAPABILITIES)
    assert json.loads(json.dumps(H100.as_dict()))["compute_capability"] == "9.0"


def test_the_system_is_named_without_what_identifies_a_host():
    system_name, release = this_machine("cpu").as_dict()["os"].split()
    assert system_name == platform.system()
    assert re.fullmatch(r"[\d.]+", release) and platform.release().startswith(release)


def test_looking_draws_no_random_numbers():
    code = (
        "import torch; from speedkit.hardware import this_machine; torch.manual_seed(0); a = torch.get_rng_state();"
        "this_machine('cpu'); assert torch.equal(a, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_compiler_on_the_path_means_no_compile(tmp_path):
    code = "from speedkit.hardware import this_machine; print(this_machine('cpu').why_not('compile'))"
    environment = {**os.environ, "CXX": "no-such-compiler", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert "needs a C++ compiler" in done.stdout and 'Use compile "off"' in done.stdout


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(UsageError, match=r"this machine has .*cpu"):
        this_machine(name)


def test_nvml_comes_from_nvidia_ml_py():
    names = {str(file) for file in importlib.metadata.files("nvidia-ml-py") or ()}
    assert "pynvml.py" in names
    assert not {"pynvml"} & {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    no_such_gpu = "00000000-0000-0000-0000-000000000000"
    assert set(hardware.nvml_facts(no_such_gpu, "driver", "power_limit_w")) <= {"driver"}


def test_fingerprint_follows_what_changes_a_ceiling():
    assert A100.fingerprint() == replace(A100).fingerprint()
    changes = [{"threads": 7}, {"driver": "999"}, {"torch_version": "0"}, {"gpu": "H100"}, {"power_limit_w": 250.0}]
    assert len({A100.fingerprint(), *(replace(A100, **change).fingerprint() for change in changes)}) == 1 + len(changes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(hardware, cache folder, ceilings), measured although a cache file is there: a broken one."""
    folder, machine = tmp_path_factory.mktemp("ceilings"), this_machine("cpu")
    (folder / f"ceilings-{ceilings_module.SCHEMA}-{machine.fingerprint()}.json").write_text("{ not JSON")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEEDKIT_CACHE_DIR", str(folder))
        yield machine, folder, ceilings(machine)


def test_ceilings_are_measured_numbers(measured):
    machine, _, found = measured
    expected = {"matmul_fp32", "memory_bandwidth", "memcpy"}
    assert expected <= set(found)
    assert ("matmul_bf16" in found) == machine.supports("bf16")
    assert "matmul_fp8" not in found and "host_to_device_pinned" not in found
    for name, ceiling in found.items():
        assert ceiling.name == name and ceiling.how
        assert 0 < ceiling.median <= ceiling.value < math.inf
        assert ceiling.unit in ("FLOP/s", "bytes/s")
    assert ("disk_read" in found) != ("disk_read" in left_out(machine))
    assert str(found["matmul_fp32"]).endswith(")") and "TFLOP/s (median" in str(found["matmul_fp32"])


def test_ceilings_are_kept_per_machine(measured):
    machine, folder, found = measured
    assert ceilings(machine) == found
    (path,) = folder.iterdir()
    assert machine.fingerprint() in path.name


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("SPEEDKIT_CACHE_DIR")
    assert cache_root() == Path.home() / ".cache" / "speedkit"
