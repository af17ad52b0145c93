"""PyTorch's real CUDA code under this package's, on GPUs that are not there: what it launches, waits for and keeps.

`python tests/dry/test_dry.py` counts everything anew, and with `image sm_80` behind it one workload on one GPU, with
`large image sm_90` the steps that lessons show: `git diff` tells what has changed.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speedkit.dry import build
from speedkit.dry.gpus import GPUS
from speedkit.dry.predict import prediction
from speedkit.dry.process import run
from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json

COUNTED = Path(__file__).parents[2] / "speedkit" / "lessons" / "dry"  # a file for each GPU
COUNTED_ON = {"sm_75": GPUS["T4"], "sm_80": GPUS["A100-40"], "sm_89": GPUS["RTX4090"], "sm_90": GPUS["H100"]}
COUNTS = ("launches", "waits", "copies", "peak_bytes", "fallbacks")  # what it holds of each course
WORKLOADS = ("text", "audio", "image", "speech")
COMPILING = ("sm_75", "sm_90")  # the GPUs for which compiled plans are counted too
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
RANKS = {  # of one rank, and in this order: DDP keeps its buckets as long as NCCL lasts
    "fsdp": {"strategy": "fsdp", "cache": "device"},
    "ddp": {"strategy": "ddp", "cache": "device"},
}
# The steps that lessons show, of nets and batches that fill a GPU, with what is predicted of them.
HALF = {"sm_75": "fp16", "sm_90": "bf16"}  # the 16 bits that a GPU has
CACHED = {"cache": "device"}
PINNED = {"pin_memory": True}
UNCOMPILED = {"preset": "fast", "compile": "off"}
LARGE = {
    "audio": {
        "pinned": PINNED,
        "prefetched": PINNED | {"prefetch": True},
        "read in every step": CACHED | {"log_every": 1},
        "read seldom": CACHED,
        "read seldom, fused": CACHED | {"fused_optimizer": True},
        "CUDA graphs": CACHED | {"fused_optimizer": True, "compile": "reduce-overhead"},
        **{f"{size} at once": {"micro_batch": size} for size in (64, 16, 4)},
        "16 bits": {"precision": HALF},
    },
    "image": {
        "channels_last": {"channels_last": True},
        "16 bits": {"precision": HALF},
        "16 bits, channels_last": {"precision": HALF, "channels_last": True},
        "blocks computed twice": {"checkpointing": "blocks"},
    },
    "speech": {},
    "text": {
        "tf32": {"precision": "tf32"},
        "16 bits": {"precision": HALF},
        "16 bits, math": {"precision": HALF, "attention": "math"},
        "16 bits, flash": {"precision": HALF, "attention": "flash"},
        "compiled": {"compile": "default"},
        "fast": {"preset": "fast"},
        "fp8, compiled": {"preset": "fast", "precision": "fp8"},
        "blocks computed twice": {"checkpointing": "blocks"},
        "half the batch, twice": {"micro_batch": 8},
    },
}
# What a T4 cannot do, and what compiles for minutes.
NOT_ON = {"sm_75": ("tf32", "fp8, compiled", "16 bits, flash", "fast", "compiled", "CUDA graphs"), "sm_90": ()}
ORDERED = {"as it comes": {}, "pinned": PINNED, "prefetched": PINNED | {"prefetch": True}}
LESSONS = {"orders": {"name": "audio", "plans": ORDERED}, "layouts": {}, "attention_kernels": {}}
OF_A_STEP = ("launches", "waits", "copies", "memory", "number_format", "seconds_by_kind", "typical_error", "seconds")
# The plans that promise that the host waits for the GPU at log points only.
NO_WAITS = ("careful", "cache on the device", "cache in RAM", "prefetch", "CUDA graphs", "fast", *RANKS)
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
    for plan, row in run("course:courses", COUNTED_ON[gpu], name=name, plans=plans).items():
        assert "error" not in row, f"{plan}: {row['error']}"
        assert row["left_bytes"] == 0, plan
        assert row["devices"] == ["cuda"], plan
        assert {part for part, launches in row["parts"].items() if launches > 0} == PARTS, plan
        lost = {field for field, value in row["effective"].items() if value != plans[plan][field]}
        assert lost == set(EXPECTED.get(plan, {}).get(name, ())) | set(EXPECTED.get(plan, {}).get(gpu, ())), plan
        assert plan not in NO_WAITS or row["waits"] == 0, plan
        assert (row["exchanges"] > 0) == (plan in RANKS), plan
        assert plan not in NO_WAITS or "Memcpy HtoD (Pageable)" not in row["copies"], plan
        before = recorded["courses"][name][plan]
        assert {key: row[key] for key in COUNTS[:3]} == {key: before[key] for key in COUNTS[:3]}, plan
        assert row["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.02), plan


QUICK = (("text", "sm_90"), ("image", "sm_75"))  # the others take as long again each
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
    for pair in itertools.product(WORKLOADS, COUNTED_ON)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_each_plan_runs_on_the_gpu_and_asks_of_it_what_it_should(name, gpu):
    check(name, gpu, PLANS)


def check_large(name, gpu, plans):
    """Count the steps of these plans anew, and see that they ask for what is recorded, and are predicted so."""
    recorded = read_json(COUNTED / f"{gpu}.json")["steps"][name]
    for plan, row in large_rows(name, gpu, plans).items():
        then = recorded[plan]
        same = {*row} - {"memory", "seconds_by_kind", "seconds"}
        assert {key: row[key] for key in same} == {key: then[key] for key in same}, plan
        assert row["memory"]["peak"] == pytest.approx(then["memory"]["peak"], rel=0.02), plan
        assert row["seconds_by_kind"] == pytest.approx(then["seconds_by_kind"], rel=0.01), plan
        assert (row["seconds"] or 0) == pytest.approx(then["seconds"] or 0, rel=0.01), plan  # none: bound by launches


@pytest.mark.slow
def test_what_lessons_show_of_a_step_is_what_is_counted_and_predicted():
    check_large("image", "sm_75", {"channels_last": LARGE["image"]["channels_last"]})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu"), itertools.product(LARGE, HALF))
def test_so_it_is_of_each_plan(name, gpu):
    plans = large_plans(name, gpu)
    assert {*plans} == {*read_json(COUNTED / f"{gpu}.json")["steps"][name]}
    check_large(name, gpu, plans)


@pytest.mark.slow
@pytest.mark.parametrize("what", LESSONS)
def test_orders_layouts_and_kernels_are_what_lessons_show(what):
    assert run(f"course:{what}", COUNTED_ON["sm_90"], **LESSONS[what]) == read_json(COUNTED / "sm_90.json")[what]


@pytest.mark.slow
def test_so_does_a_rank_of_several_with_what_it_sends_the_others():
    check("text", "sm_90", RANKS)


@pytest.mark.slow
def test_what_reads_a_number_back_in_each_step_is_counted_as_a_wait():
    plans = {"cache on the device": PLANS["cache on the device"]}
    row = run("course:courses", COUNTED_ON["sm_90"], name="text", plans=plans, read_back=True)["cache on the device"]
    assert row["waits"] == 1


@pytest.mark.slow
def test_what_a_loop_reads_every_fifty_steps_is_found_by_a_profile_at_its_line():
    audited, syncs = run("course:seen_of_a_loop", COUNTED_ON["sm_90"], read_every=50)
    assert 50 <= audited <= 100 and syncs == [("loss.item()", audited // 50)]


@pytest.mark.slow
def test_each_switch_of_a_script_is_switched_on_a_gpu_and_leaves_all_as_it_was():
    found = run("course:switched_in_a_script", COUNTED_ON["sm_80"])
    assert {"precision=tf32", "pin_memory=True", "compile=reduce-overhead", "attention=flash"} <= found.keys()
    attention = found.pop("attention=cudnn")  # which the stand-in has not: the others stand in for it
    assert not any(found.values()), found
    assert "left" not in attention


@pytest.mark.slow
def test_where_memory_runs_out_the_micro_batch_is_halved_and_training_goes_on():
    small = COUNTED_ON["sm_75"]._replace(mib=580)  # of which CUDA itself takes 550
    row = run("course:courses", small, name="text", plans={"baseline": {}})["baseline"]
    assert "out of memory at step 1" in " ".join(row["fallbacks"]) and row["micro_batch"] in (4, 8)


WHOLE = [pytest.param(name, marks=pytest.mark.slow) for name in ("audio", "image", "speech")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", *WHOLE])
def test_a_training_evaluates_keeps_checkpoints_and_goes_on_from_them(name):
    logs, evaluations, device, resumed_from = run("course:whole", COUNTED_ON["sm_75"], name=name, fields=PLANS["fp16"])
    assert (logs, evaluations, device, resumed_from) == (5, 3, "cuda", 8)


@pytest.mark.slow
def test_group_norm_stays_in_the_format_of_its_input():
    rows = run("course:group_norms", COUNTED_ON["sm_90"])
    for (given, returned, left_bytes), (_, wide, wide_bytes) in zip(rows[::2], rows[1::2], strict=True):
        assert returned == given and wide == "torch.float32"
        assert left_bytes <= (0.55 if given != wide else 1) * wide_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_real_gpu_is_asked_for_the_same(name, request):
    if not (request.config.getoption("--on-silicon") and torch.cuda.is_available()):
        pytest.skip("takes --on-silicon, and a GPU")
    path = COUNTED / f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}.json"
    if not path.exists():
        pytest.skip(f"there is no {path.name}: its GPU was not counted")
    import course  # switches attention by cuDNN off, as for what is recorded

    for plan, before in read_json(path)["courses"][name].items():
        if plan in PLANS:
            row = course.on_silicon(name, PLANS[plan], never_waits=plan in NO_WAITS)
            assert row["copies"] == before["copies"], plan
            assert row["launches"] >= before["launches"], plan  # cuDNN and cuBLAS take several kernels for some
            assert row["peak_bytes"] >= 0.98 * before["peak_bytes"], plan  # cuDNN's workspaces come on top


@pytest.mark.slow
@pytest.mark.xfail(reason="cuDNN's frontend asks more of an engine for attention than the stand-in offers", strict=True)
def test_attention_of_cudnn_runs():
    row = run("course:attention_of_cudnn", COUNTED_ON["sm_90"])
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


@pytest.mark.slow
def test_what_the_stand_in_does_not_know_is_named(tmp_path):
    code = tmp_path / "model.c"
    code.write_text(
        "void *__cudaRegisterFatBinary(void *);\n"
        "__attribute__((constructor)) void load(void) { __cudaRegisterFatBinary(load); }\n"
    )
    extension = tmp_path / "kernels.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", code, "-o", extension], check=True)
    with pytest.raises(SpeedkitError, match=r"kernels.so has CUDA kernels of its own"):
        run("ctypes:CDLL", COUNTED_ON["sm_90"], name=str(extension))
    script = tmp_path / "script.py"
    script.write_text("import ctypes, os\nctypes.CDLL(os.environ['DRY_GPU_LIBRARY']).cudaIpcCloseMemHandle()\n")
    with pytest.raises(SpeedkitError, match=rf"torch {re.escape(torch.__version__)} calls .* lacks: cudaIpcCloseMem"):
        run("speedkit.lab.script.dry:counted_script", COUNTED_ON["sm_90"], script=str(script), argv=[])


@pytest.mark.slow
@pytest.mark.parametrize(("script", "ends"), [("assert read < 0", "AssertionError"), ("os._exit(3)", "ended with 3")])
def test_a_script_that_insists_on_a_number_of_the_gpu_is_told_the_line_that_read_it(tmp_path, script, ends):
    path = tmp_path / "script.py"
    path.write_text(f"import os, torch\nread = abs(torch.ones(2, device='cuda').sum().item()) + 1\n{script}\n")
    with pytest.raises(SpeedkitError, match=rf"at line 2 of .*script.py: read = (.*\n)*.*{ends}"):
        run("speedkit.lab.script.dry:counted_script", COUNTED_ON["sm_90"], script=str(path), argv=[])


@pytest.mark.slow
def test_an_error_in_that_process_is_told_with_its_lines():
    with pytest.raises(SpeedkitError, match=r"math:nothing on Tesla T4 failed:\n(.*\n)*AttributeError"):
        run("math:nothing", COUNTED_ON["sm_75"])


def plans_of(name, gpu):
    """The plans that are counted of a workload on a GPU, by process."""
    yield PLANS
    if gpu in COMPILING:
        yield COMPILED
    if (name, gpu) == ("text", "sm_90"):
        yield RANKS


def large_plans(name, gpu):
    """The plans of a workload whose steps lessons show on a GPU."""
    plans = {"baseline": {}, "careful": {"preset": "careful"}, "fast, uncompiled": UNCOMPILED} | LARGE[name]
    plans = {plan: fields for plan, fields in plans.items() if plan not in NOT_ON[gpu]}
    return {
        plan: fields | {"precision": HALF[gpu]} if fields.get("precision") is HALF else fields
        for plan, fields in plans.items()
    }


def large_rows(name, gpu, plans):
    """What steps of these plans ask of a GPU, and what is predicted of them, as it is recorded."""
    rows = {}
    for plan, found in run("course:large_steps", COUNTED_ON[gpu], timeout_s=3600, name=name, plans=plans).items():
        row = found | prediction(found, COUNTED_ON[gpu])
        row["seconds_by_kind"] = {kind: float(f"{seconds:.4g}") for kind, seconds in row["seconds_by_kind"].items()}
        row["seconds"] = None if row["launch_bound"] else float(f"{row['seconds']:.4g}")
        rows[plan] = {key: row[key] for key in OF_A_STEP + ("kernels",) * (name == "text")}
    return rows


def count_large(name, gpu, *chosen):
    """Write the steps of a workload that lessons show, of all plans or the `chosen`, and what else they show."""
    path = COUNTED / f"{gpu}.json"
    plans = {plan: fields for plan, fields in large_plans(name, gpu).items() if plan in chosen or not chosen}
    rows = large_rows(name, gpu, plans)
    recorded = read_json(path)
    steps = recorded.setdefault("steps", {})
    steps[name] = steps.get(name, {}) | rows
    for what, arguments in LESSONS.items() if name == "audio" else ():
        recorded[what] = run(f"course:{what}", COUNTED_ON[gpu], **arguments)
    write_json(path, recorded)
    print(gpu, name, json.dumps({plan: row["seconds"] for plan, row in rows.items()}), flush=True)


def count(name, gpu):
    """Write what each course of a workload asks of a GPU."""
    rows = {}
    for plans in plans_of(name, gpu):
        rows |= run("course:courses", COUNTED_ON[gpu], timeout_s=3600, name=name, plans=plans)
    path = COUNTED / f"{gpu}.json"
    recorded = read_json(path) if path.exists() else {}
    facts = {"torch": torch.__version__, "gpu": COUNTED_ON[gpu]._asdict(), "counted": "on a GPU that is not there"}
    courses = recorded.get("courses", {}) if recorded.get("torch") == torch.__version__ else {}
    courses[name] = {plan: {key: row.get(key) for key in COUNTS} for plan, row in rows.items()}
    write_json(path, recorded | facts | {"courses": dict(sorted(courses.items()))})
    print(gpu, name, json.dumps({plan: row.get("launches", row) for plan, row in rows.items()}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] == ["large"]:
        count_large(*sys.argv[2:])
    else:
        for chosen in [sys.argv[1:]] if sys.argv[1:] else itertools.product(WORKLOADS, COUNTED_ON):
            count(*chosen)
