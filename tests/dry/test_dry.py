"""PyTorch's real CUDA code under this package's, on GPUs that are not there: what it launches, waits for and keeps.

`python tests/dry/test_dry.py` counts everything anew.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from speedkit.dry import build
from speedkit.dry.gpus import GPUS
from speedkit.dry.process import run
from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json

COUNTED = Path(__file__).parents[2] / "speedkit" / "lessons" / "dry"  # a file for each GPU
COUNTS = ("launches", "waits", "copies", "peak_bytes", "fallbacks")  # what it holds of each course
PARTS = {"forward", "backward", "update"}

PLANS = {
    "baseline": {},
    "careful": {"preset": "careful"},
    "cache on the device": {"cache": "device"},
    "cache in RAM": {"cache": "ram", "pin_memory": True, "prefetch": True},
    "prefetch": {"prefetch": True, "pin_memory": True},
    "features on the device": {"features_on": "device"},
    "bucket": {"bucket": True},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "channels_last": {"channels_last": True},
    "cudnn_benchmark": {"cudnn_benchmark": True},
    "fused optimizer": {"fused_optimizer": True},
    "flash": {"attention": "flash", "precision": "bf16"},
    "varlen": {"attention": "varlen", "precision": "bf16"},
    "checkpointing": {"checkpointing": "blocks"},
    "micro_batch": {"micro_batch": 8},
}
COMPILED = {
    "fast": {"preset": "fast"},
    "compile": {"compile": "default"},
    "compiled blocks": {"compile": "default", "compile_scope": "blocks"},
    "CUDA graphs": {"compile": "reduce-overhead", "cache": "device"},
}
NO_WAITS = ("careful", "cache on the device", "cache in RAM", "prefetch", "CUDA graphs", "fast")  # between log points
# Stubs that were called, each of which may do nothing.
MAY_DO_NOTHING = {
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasSetMathMode",
    "cublasSetStream_v2",
    "cublasSetWorkspace_v2",
    "cudaEventQuery",  # whatever was asked for is done
    "cudaFuncSetAttribute",
    "cudaStreamWaitEvent",
    "cudnnSetStream",
    "cufftSetAutoAllocation",
    "cufftSetStream",
    "cufftSetWorkArea",
}
# The fields that a plan does not get, by workload and by GPU.
EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "cache in RAM": {"text": ("cache",)},
    "features on the device": {"text": ("features_on",), "speech": ("features_on",)},
    "bucket": {"text": ("bucket",), "audio": ("bucket",), "image": ("bucket",)},
    "cudnn_benchmark": {"speech": ("cudnn_benchmark",)},
    "varlen": {
        "text": ("attention",),
        "audio": ("attention",),
        "image": ("attention",),
        "sm_75": ("attention", "precision"),
    },
    "flash": {"sm_75": ("attention", "precision")},
    "tf32": {"sm_75": ("precision",)},
    "bf16": {"sm_75": ("precision",)},
    "fp8": {"sm_75": ("precision",), "sm_80": ("precision",)},
}


@pytest.fixture(autouse=True)
def course_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def check(name, gpu, plans):
    """Run the courses of a workload on a GPU, and see that each did what it should, and what it did before."""
    recorded = read_json(COUNTED / f"{gpu}.json")
    assert recorded["torch"] == torch.__version__, "another torch launches other kernels: count them anew"
    for plan, row in run("course:courses", GPUS[gpu], name=name, plans=plans).items():
        assert "error" not in row, f"{plan}: {row['error']}"
        assert row["devices"] == ["cuda"], plan
        assert {part for part, launches in row["parts"].items() if launches > 0} == PARTS, plan
        lost = {field for field, value in row["effective"].items() if value != plans[plan][field]}
        assert lost == set(EXPECTED.get(plan, {}).get(name, ())) | set(EXPECTED.get(plan, {}).get(gpu, ())), plan
        assert plan not in NO_WAITS or row["waits"] == 0, plan
        assert plan not in NO_WAITS or "Memcpy HtoD (Pageable)" not in row["copies"], plan
        assert set(row["stubs"]) <= MAY_DO_NOTHING, plan
        before = recorded["courses"][name][plan]
        assert {key: row[key] for key in COUNTS[:3]} == {key: before[key] for key in COUNTS[:3]}, plan
        assert row["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.02), plan


# One process for each; the other workloads and GPUs take as long again each.
EAGER = [
    ("text", "sm_90"),
    ("audio", "sm_75"),
    pytest.param("image", "sm_89", marks=pytest.mark.slow),
    pytest.param("speech", "sm_80", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "gpu"), EAGER)
def test_each_plan_runs_on_the_gpu_and_asks_of_it_what_it_should(name, gpu):
    check(name, gpu, PLANS)


@pytest.mark.slow
def test_so_does_each_plan_that_compiles():
    check("text", "sm_90", COMPILED)


def test_what_reads_a_number_back_in_each_step_is_counted_as_a_wait():
    plans = {"cache on the device": PLANS["cache on the device"]}
    row = run("course:courses", GPUS["sm_90"], name="text", plans=plans, read_back=True)["cache on the device"]
    assert row["waits"] == 1


def test_where_memory_runs_out_the_micro_batch_is_halved_and_training_goes_on():
    small = GPUS["sm_75"]._replace(mib=580)  # of which CUDA itself takes 550
    row = run("course:courses", small, name="text", plans={"baseline": {}})["baseline"]
    assert "out of memory at step 1" in " ".join(row["fallbacks"]) and row["micro_batch"] in (4, 8)


WHOLE = [pytest.param(name, marks=pytest.mark.slow) for name in ("audio", "image", "speech")]


@pytest.mark.parametrize("name", ["text", *WHOLE])
def test_a_training_evaluates_keeps_checkpoints_and_goes_on_from_them(name):
    logs, evaluations, device, resumed_from = run("course:whole", GPUS["sm_75"], name=name, fields=PLANS["fp16"])
    assert (logs, evaluations, device, resumed_from) == (5, 3, "cuda", 8)


@pytest.mark.xfail(reason="cuDNN's frontend asks more of an engine for attention than the stand-in offers", strict=True)
def test_attention_of_cudnn_runs():
    row = run("course:attention_of_cudnn", GPUS["sm_90"])
    assert row > 0


# What cannot be.


def test_without_a_compiler_or_cuda_code_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SpeedkitError, match=r"built by g\+\+, which is missing"):
        build.build()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SpeedkitError, match="is a CPU build"):
        build.build()


def test_an_error_in_that_process_is_told_with_its_lines():
    with pytest.raises(SpeedkitError, match=r"course:nothing on Tesla T4 failed:\n(.*\n)*AttributeError"):
        run("course:nothing", GPUS["sm_75"])


def count_all():
    """Write what every course asks of every GPU."""
    sys.path.insert(0, str(Path(__file__).parent))
    for name, gpu in (("text", "sm_90"), ("audio", "sm_75"), ("image", "sm_89"), ("speech", "sm_80")):
        rows = run("course:courses", GPUS[gpu], timeout_s=3600, name=name, plans=PLANS)
        if name == "text":  # in a process of its own, as in the test: what ran before leaves something in memory
            rows |= run("course:courses", GPUS[gpu], timeout_s=3600, name=name, plans=COMPILED)
        courses = {plan: {key: row[key] for key in COUNTS} for plan, row in rows.items()}
        counted = {"torch": torch.__version__, "gpu": GPUS[gpu]._asdict(), "counted": "on a GPU that is not there"}
        write_json(COUNTED / f"{gpu}.json", counted | {"courses": {name: courses}})
        print(gpu, name, json.dumps({plan: row["launches"] for plan, row in courses.items()}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    count_all()
