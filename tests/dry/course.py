"""Runs on a GPU that is not there, and what they asked of it: each function is called in a process that has one."""

import collections
import contextlib
import dataclasses
import functools
import gc
import os
import re
import runpy
import tempfile
import traceback
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speedkit.dry import step
from speedkit.dry.counts import LAUNCHED, counted, library
from speedkit.lab.script.bench import Bench
from speedkit.lab.script.handover import Handover
from speedkit.lab.script.profile import ScriptProfile
from speedkit.lab.workloads import audio, load_workload
from speedkit.lab.workloads.residual import GroupNorm
from speedkit.machine import this_machine
from speedkit.measure.optimizations import text
from speedkit.measure.predict import FUSED
from speedkit.measure.profile import profile
from speedkit.plan import PRESETS
from speedkit.train import setup
from speedkit.train.fit import fit
from speedkit.train.loop import steps
from speedkit.train.ranks import Ranks
from speedkit.train.setup import setup_run

torch.backends.cuda.enable_cudnn_sdp(False)  # its graphs ask more of an engine than the stand-in offers

FEW = {"text": {}, "image": {"clips": 200}, "audio": {"clips": 200}, "speech": {"clips": 100}}  # what data to make
WARM_UP, COUNTED = 4, 2  # steps, between two log points
# What lessons train on a GPU, all of size medium: the data to make, and samples per step.
LARGE = {
    "text": ({}, 16),
    "image": ({"clips": 200}, 64),
    "audio": ({"clips": 700}, 256),
    "speech": ({"clips": 200}, 64),
}
FORMATS = {"0": "fp32", "2": "fp16", "14": "bf16", "28": "e4m3", "29": "e5m2"}  # CUDA's numbers for them
KERNELS = 10  # of a step, that are kept by name


def small(name):
    workload = load_workload(name, size="tiny", **FEW[name])
    return dataclasses.replace(workload, train=workload.train[:400], test=workload.test[:40])


def plan_of(fields):
    fields = dict(fields)
    preset = PRESETS[fields.pop("preset", "baseline")](this_machine("cuda"))
    return dataclasses.replace(preset, **{"log_every": 1000} | fields)


def as_one_rank(plan, recipe, device):
    """The only rank of a run: what it exchanges goes to NCCL."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
    ranks = Ranks(plan, recipe, device)
    ranks.several = True
    ranks.sharded = plan.strategy == "fsdp"
    return ranks


def joined(fields):
    """Inside, a plan with a strategy for several ranks has one."""
    return patch.object(setup, "Ranks", as_one_rank) if "strategy" in fields else contextlib.nullcontext()


def launches_so_far():
    """How often the host has made the GPU compute since the block of `counted` began."""
    return sum(library().dry_count(kind.encode()) for kind in LAUNCHED)


def adding(launches, part, function):
    """`function`, whose launches are added to those of its part of a step."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        before = launches_so_far()
        returned = function(*args, **kwargs)
        launches[part] += launches_so_far() - before
        return returned

    return call


def course(workload, fields, cache_dir, read_back=False):
    """What COUNTED steps of a plan asked of the GPU, per step, and what became of the plan."""
    launches = collections.Counter()
    loss = adding(launches, "forward", workload.loss)

    def reading(*args):
        value, outputs = loss(*args)
        value.item()
        return value, outputs

    workload = dataclasses.replace(workload, loss=reading if read_back else loss)
    plan = plan_of(fields)
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined(fields))
        run = stack.enter_context(
            contextlib.closing(
                setup_run(workload, plan=plan, device="cuda", endless=True, progress=False, cache_dir=cache_dir)
            )
        )
        optimizer = run.learner.optimizer
        stack.enter_context(
            patch.object(torch.autograd, "backward", adding(launches, "backward", torch.autograd.backward))
        )
        stack.enter_context(patch.object(optimizer, "step", adding(launches, "update", optimizer.step)))
        training = steps(run)
        for _ in range(WARM_UP if "strategy" not in fields else 12):  # of which DDP times ten, and waits
            next(training)
        torch.cuda.reset_peak_memory_stats()
        launches.clear()
        with counted() as counts:
            for _ in range(COUNTED):
                next(training)
        return {
            "devices": sorted({weight.device.type for weight in run.learner.model.parameters()}),
            "parts": {part: number / COUNTED for part, number in launches.items()},
            "effective": {field: getattr(run.plan, field) for field in fields if field != "preset"},
            "fallbacks": [str(fallback) for fallback in run.effective.fallbacks],
            "launches": counts.launches / COUNTED,
            "waits": counts["sync"] / COUNTED,
            "copies": {name: number / COUNTED for name, number in counts.names["memcpy"].items()},
            "exchanges": counts["nccl"] / COUNTED,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "micro_batch": run.learner.micro_batch,
        }


def left_on_the_gpu():
    """Forget what an earlier course has left in memory; return the bytes that stay nevertheless."""
    torch._dynamo.reset()  # compiled code, whose CUDA graphs have memory of their own
    audio.mel_transform.cache_clear()  # filters of a device
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def on_silicon(name, fields, never_waits):
    """What COUNTED steps of a plan ask of a real GPU, per step: by PyTorch's profiler, in the same words.

    One that `never_waits` raises RuntimeError where the host waits.
    """
    left_on_the_gpu()
    with tempfile.TemporaryDirectory() as cache_dir:
        run = setup_run(
            small(name), plan=plan_of(fields), device="cuda", endless=True, progress=False, cache_dir=cache_dir
        )
        with contextlib.closing(run):
            training = steps(run)
            for _ in range(WARM_UP):
                next(training)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                torch.cuda.set_sync_debug_mode("error" if never_waits else "default")
                for _ in range(COUNTED):
                    next(training)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_allocated()
    on_gpu = torch.autograd.DeviceType.CUDA
    names = [event.name.replace(" -> Device", "") for event in seen.events() if event.device_type == on_gpu]
    copies = collections.Counter(name.removesuffix(" (Device)") for name in names if name.startswith("Memcpy"))
    kernels = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
    return {
        "launches": len(kernels) / COUNTED,
        "copies": {name: number / COUNTED for name, number in copies.items()},
        "peak_bytes": peak_bytes,
    }


def courses(name, plans, read_back=False):
    """The course of each plan of a workload by name, or how it failed.

    All begin alike, and none is disturbed by Python's garbage collection, which comes when it likes: tensors that it
    frees sooner or later would be another peak.
    """
    workload = small(name)
    rows = {}
    gc.disable()
    with tempfile.TemporaryDirectory() as cache_dir:
        for compiler in ("TORCHINDUCTOR", "TRITON"):  # code that was kept takes other memory than code made anew
            os.environ[f"{compiler}_CACHE_DIR"] = str(Path(cache_dir, compiler))
        for plan, fields in plans.items():
            left_bytes = left_on_the_gpu()
            try:
                rows[plan] = course(workload, fields, cache_dir, read_back) | {"left_bytes": left_bytes}
            except Exception:
                rows[plan] = {"error": traceback.format_exc()}
    return rows


def large(name):
    """A workload as lessons train it on a GPU, and its recipe."""
    fields, batch_size = LARGE[name]
    workload = load_workload(name, size="medium", **fields)
    return workload, dataclasses.replace(workload.recipe, batch_size=batch_size)


def large_steps(name, plans):
    """What a step of each plan asks for at that size, loading and all: what `speedkit dry-run` counts."""
    workload, recipe = large(name)
    rows = {}
    for plan, fields in plans.items():
        left_on_the_gpu()
        asked = plan_of(fields)
        found = step.eager_step(workload, recipe, dataclasses.replace(asked, compile="off"))
        if asked.compile != "off":
            found |= step.compiled_step(workload, recipe, asked)
            if workload.length is not None:  # code for several lengths: its bytes are no step's
                found["fused_bytes"] = found["model_bytes"] // FUSED
        rows[plan] = found | {"kernels": by_kind(found["kernels"])}
    return rows


def by_kind(kernels):
    """How many kernels of each kind: those that Inductor generates are one, and products of one format."""
    kinds = collections.Counter()
    for name, number in kernels.items():
        kind = re.sub(r" [mnk]=\d+| batch=\d+| d?x=.*", "", name)
        kind = re.sub(r" type=(\d+)", lambda found: f" {FORMATS[found[1]]}", kind)
        kinds["generated by Inductor" if kind.startswith("triton_") else kind.rpartition("::")[2]] += number
    kept = dict(kinds.most_common(KERNELS))
    return kept | {"others": kinds.total() - sum(kept.values())}


class Order(TorchDispatchMode):
    """In which order a step copies to the GPU, waits and launches: [what, on a stream of its own, how often]."""

    KINDS = ("memcpy", "sync", *LAUNCHED)

    def __init__(self):
        super().__init__()
        self.events = []
        self.before = self.counts()

    def counts(self):
        return {kind: library().dry_count(kind.encode()) for kind in self.KINDS}

    def note(self, from_host):
        counts = self.counts()
        aside = torch.cuda.current_stream() != torch.cuda.default_stream()
        for kind in self.KINDS:
            what = {"memcpy": "copy" if from_host else "kernels", "sync": "wait"}.get(kind, "kernels")
            number = counts[kind] - self.before[kind]
            if number and self.events and self.events[-1][:2] == [what, aside]:
                self.events[-1][2] += number
            elif number:
                self.events.append([what, aside, number])
        self.before = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.note(from_host=False)
        returned = function(*args, **(kwargs or {}))
        self.note(any(isinstance(leaf, torch.Tensor) and leaf.is_cpu for leaf in tree_leaves((args, kwargs))))
        return returned


def orders(name, plans):
    """The Order of a step of each plan, between the first and the last of an epoch."""
    workload, recipe = large(name)
    recipe = dataclasses.replace(recipe, batch_size=recipe.batch_size // 4)
    rows = {}
    for plan, fields in plans.items():
        with step.run_of(workload, recipe, plan_of(fields)) as run, counted():
            training = steps(run)
            for _ in range(WARM_UP):
                next(training)
            with Order() as order:
                next(training)
        rows[plan] = order.events
    return rows


def layouts():
    """In which layout the layers of lesson 24 return what they take as NHWC."""
    layers = [torch.nn.Conv2d(16, 16, 3), torch.nn.GroupNorm(1, 16), GroupNorm(1, 16), torch.nn.InstanceNorm2d(16)]
    layers += [torch.nn.BatchNorm2d(16), torch.nn.GELU(), torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(4)]
    inputs = torch.randn(2, 16, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    rows = {}
    for layer in layers:
        outputs = layer.cuda().to(memory_format=torch.channels_last)(inputs)
        kept = outputs.is_contiguous(memory_format=torch.channels_last)
        name = type(layer).__name__ if type(layer) is not GroupNorm else "speedkit's GroupNorm"
        rows[name] = "NHWC" if kept else "NCHW"
    return rows


def attention_kernels():
    """Which kernels the calls of lesson 25 launch, with the kernel of attention first."""
    query = torch.randn(2, 4, 64, 64, device="cuda")
    bias = torch.zeros(1, 4, 64, 64, device="cuda")
    rows = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for call, mask in {"plain": None, "mask [1, H, T, T]": bias, "mask [H, T, T]": bias[0]}.items():
            inputs = [query.to(dtype)] * 3
            with counted() as counts:
                torch.nn.functional.scaled_dot_product_attention(*inputs, None if mask is None else mask.to(dtype))
            names = [step.LONG.sub("", name) for kind in LAUNCHED for name in counts.names[kind]]
            fused = [name for name in names if "flash" in name or "fmha" in name]
            rows[f"{str(dtype)[6:]}, {call}"] = fused[0] if fused else f"math: {counts.launches} kernels"
    return rows


def whole(name, fields):
    """A training to its end with evaluations and checkpoints, and another that goes on from there."""
    workload = small(name)
    workload = dataclasses.replace(workload, recipe=dataclasses.replace(workload.recipe, epochs=None, steps=8))
    with tempfile.TemporaryDirectory() as folder, joined(fields):
        train = functools.partial(
            fit,
            workload,
            plan=dataclasses.replace(plan_of(fields), log_every=2, validate_every=3),
            device="cuda",
            progress=False,
            deterministic=True,  # PyTorch raises where an operator has no such kernel
            out=Path(folder, "out"),
            cache_dir=folder,
        )
        first = train()
        again = train(resume=True)
    return len(first.loss), len(first.evaluations), first.device, again.resumed_from


def group_norms():
    """The format of what our group normalisation and PyTorch's return in autocast, and the bytes they leave behind."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inputs = torch.ones(4, 8, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        for kind in (GroupNorm, torch.nn.GroupNorm):
            norm = kind(1, 8).cuda()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                outputs = norm(inputs)
            rows.append((str(dtype), str(outputs.dtype), torch.cuda.memory_allocated() - before))
            del outputs
    return rows


def attention_of_cudnn():
    """How many kernels attention by cuDNN takes, forward and backward."""
    query = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    with counted() as counts, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    return counts.launches


def seen_of_a_loop(read_every):
    """What a profile finds to wait for in a loop that reads its loss every so many steps."""
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(model, optimizer, torch.utils.data.DataLoader(torch.zeros(8, 8), 4), show=False) as seen:
        for number in range(200):
            for inputs in seen.loader:
                loss = model(inputs.pin_memory().cuda(non_blocking=True)).sum()
                loss.backward()
                optimizer.step()
            if 2 * number % read_every == 0:
                loss.item()
    facts = seen.breakdown.facts
    return facts.audited, [(sync.code, sync.count) for sync in facts.syncs]


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 24, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        parts = self.convolution(inputs).flatten(2).transpose(1, 2).contiguous().unflatten(2, (3, 8)).transpose(1, 2)
        return self.head(nn.functional.scaled_dot_product_attention(*parts.split(1, 1)).mean((1, 2)))

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,)))
for _ in range(1000):
    for inputs, labels in torch.utils.data.DataLoader(data, 8):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(net(inputs.to("cuda")), labels.cuda()).backward()
        optimizer.step()
"""


def switched_in_a_script():
    """Each change that can be tried in a script on this GPU: why it is not, or what it left that is not as before."""
    found = {}

    def left():
        weight = next(iter(bench.loop.optimizers[0].state))
        step = bench.loop.optimizers[0].state[weight]["step"].device.type
        switches = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
        return weight.stride(), step, switches, torch.Tensor.to, bench.loop.forwards[0].compiled
        yield

    def tuning():
        handover.ask(bench.count)
        before = handover.ask(left)
        for _, fields, why in handover.ask(bench.candidates):
            if not why:
                try:
                    handover.ask(functools.partial(bench.turn, fields, 2))
                except Exception as error:
                    why = f"it failed: {error}"
                handover.ask(functools.partial(bench.turn, {}, 2))
                now = handover.ask(left)
                why += "".join(f"left {new}" for old, new in zip(before, now, strict=True) if old != new)
            found[text(fields)] = why

    handover = Handover(tuning)
    bench = Bench(handover, lambda: True)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        seen = ScriptProfile(Path(folder), 1e6, stop=False)
        seen.answered = True
        with contextlib.suppress(SystemExit), seen.installed(), bench.installed(seen):
            runpy.run_path(str(script))
    if handover.error is not None:
        raise handover.error
    return found
