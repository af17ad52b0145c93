"""What a training step asks of a GPU: counted in the process that has the one that is not there."""

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from speedkit.data.batch import map_batch
from speedkit.dry.counts import LAUNCHED, Counts, counted
from speedkit.machine import this_machine
from speedkit.measure.predict import FUSED
from speedkit.measure.roofline import OperatorCounter, Operators, format_of_products
from speedkit.plan import CUDA_GRAPHS, Plan, as_plan
from speedkit.recipe import Recipe
from speedkit.train.attention import leave_out_cudnn
from speedkit.train.loop import steps, train
from speedkit.train.memory import OUT_OF_MEMORY, release
from speedkit.train.micro_batch import peak_of_step, trial_plan, with_longest_first
from speedkit.train.run import TrainingRun
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

GPU = torch.device("cuda")
WARM_UP = 2  # steps: the first allocates the optimizer's state, and compiles
RECORDED = 2  # steps more, in which CUDA graphs are recorded
LARGEST = 1 << 14  # samples of a micro-batch, or times the longest sample: beyond it none is tried
FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
LONG = re.compile(r"\(anonymous namespace\)::|void |at::native::|[<(].*")  # of a kernel's name, what says little
UPDATES = ("_foreach", "_fused", "_amp")  # how the names of an optimizer's operators begin


def counted_step(workload: Workload, recipe: Recipe, plan: Plan | str, *, search: bool = True) -> dict[str, Any] | None:
    """Return what a step of a plan asks of this process's GPU, as plain values; None where not one sample fits.

    Loading is left out, and a cache in the GPU's memory. `search`: with the largest micro-batch and length that fit.
    """
    asked = as_plan(plan, this_machine(GPU))
    plain = dataclasses.replace(trial_plan(asked), micro_batch=asked.micro_batch)
    try:
        found = eager_step(workload, recipe, plain)
        if asked.compile != "off":
            mode: Any = "reduce-overhead" if asked.compile in CUDA_GRAPHS else "default"
            found |= compiled_step(workload, recipe, dataclasses.replace(plain, compile=mode))
            if workload.length is not None:  # code for several lengths: its bytes are no step's
                found["fused_bytes"] = found["model_bytes"] // FUSED
        if search:
            found |= largest_that_fit(workload, recipe, plain)
    except Exception as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        return None
    return found


def run_of(workload: Workload, recipe: Recipe, plan: Plan) -> contextlib.closing[TrainingRun]:
    """Return a run that is closed at the end of a block.

    It computes no attention by cuDNN, whose graphs ask more of an engine than the stand-in offers.
    """
    release(GPU)
    run = setup_run(workload, recipe, plan, device=GPU, endless=True, progress=False)
    leave_out_cudnn(run.learner.model)
    return contextlib.closing(run)


def eager_step(workload: Workload, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the facts of a step without compiled code, and what its operators compute and move."""
    with run_of(workload, recipe, plan) as run:
        found = facts_of_step(run)
        counter = OperatorCounter()
        rest, model = counter.moved_bytes, Counter[str]()
        note = functools.partial(setattr, counter, "moved_bytes")
        run.position.batch = next(run.data.training_batches)  # loading is not counted
        with between(run.learner.model, functools.partial(note, model), functools.partial(note, rest)), counter:
            next(steps(run))
    moved = rest + model
    outside = Counter(moved)
    for name in model:
        if name not in counter.flops and not name.startswith(UPDATES):
            outside[name] -= model[name]
    return found | {
        "flops": dict(counter.flops),
        "moved_bytes": dict(moved),
        "number_format": number_format(counter, run.plan.precision),
        "outside_bytes": dict(+outside),  # of these, without the passes over activations within the model
        "model_bytes": moved.total() - outside.total(),
    }


def number_format(counter: OperatorCounter, precision: str) -> str:
    """Return the number format of most products that were counted, those of float32 under a plan's `precision`.

    Of 8-bit layers the products are counted as PyTorch calls them, before their inputs are rounded.
    """
    if precision == "fp8":
        return precision
    [(kind, _)] = counter.formats.most_common(1) or [(torch.float32, 0)]
    found = FORMATS.get(kind) or format_of_products(precision, Operators(counter.flops, {}), GPU)
    if found == "tf32" and not this_machine(GPU).supports("tf32"):
        return "fp32"
    return found


@contextlib.contextmanager
def between(module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> Any:
    """Inside, `enter` is called where the forward and the backward pass of a module begin, and `leave` after the one.

    The backward pass is over where the optimizer begins.
    """

    def leaves(_module: Any, _inputs: Any, outputs: Any) -> None:
        leave()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _gradient: enter())

    hooks = [module.register_forward_pre_hook(lambda _module, _inputs: enter()), module.register_forward_hook(leaves)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compiled_step(workload: Workload, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the facts of a compiled step, and the bytes that the kernels that were generated for it move."""
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # else Inductor counts no bytes
    # Nor does it of code that was kept.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    metrics.reset()
    with run_of(workload, recipe, plan) as run:
        found = facts_of_step(run)
    generated = [words for node, words in metrics.nodes_num_elem if not node.is_extern()]
    return found | {"fused_bytes": 4 * sum(generated)}


def facts_of_step(run: TrainingRun) -> dict[str, Any]:
    """Return what a step launches, waits for and keeps, after some that are not counted."""
    training = steps(run)
    for _ in range(WARM_UP):
        next(training)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(RECORDED * (run.plan.compile in CUDA_GRAPHS)):  # of replays PyTorch's allocator knows nothing
        next(training)
    with counted() as counts:
        next(training)
    learner = run.learner
    return step_facts(counts, [learner.model], learner.optimizer) | {
        "micro_batch": min(learner.micro_batch, run.recipe.batch_size),  # of a user's own batches it has no limit
        "fallbacks": [str(fallback) for fallback in run.effective.fallbacks],
    }


def step_facts(counts: Counts, models: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    """Return what a step launched and waited for, and what its models and optimizer keep."""
    models = nn.ModuleList(models)  # which counts what they share once
    states = [value for state in optimizer.state.values() for value in state.values()]
    memory = {
        "weights": size_of([*models.parameters(), *models.buffers()]),
        "gradients": size_of(weight.grad for weight in models.parameters()),
        "optimizer": size_of(states),
    }
    memory["activations"] = torch.cuda.max_memory_allocated() - sum(memory.values())
    memory |= {"peak": sum(memory.values()), "reserved": torch.cuda.memory_reserved()}
    kernels = Counter[str]()
    for kind in LAUNCHED:
        for name, number in counts.names[kind].items():
            kernels[LONG.sub("", name)] += number
    return {
        "memory": memory,
        "launches": counts.launches,
        "waits": counts["sync"],
        "copies": dict(counts.names["memcpy"]),
        "kernels": dict(kernels.most_common()),
    }


def size_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of those of `tensors` that are tensors on the GPU."""
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda)


def largest_that_fit(workload: Workload, recipe: Recipe, plan: Plan) -> dict[str, int]:
    """Return how many of the longest samples fit into one forward pass, and where lengths differ how long a batch may.

    Found by bisection on PyTorch's own allocator. Nothing is known of batches that cannot be taken apart.
    """
    with run_of(with_longest_first(workload), recipe, plan) as run:
        longest: Any = next(run.data.test.one_epoch())
        if not getattr(longest, "splits", True):
            return {}

        def of_size(size: int) -> Any:
            chosen = torch.arange(size, device=GPU) % len(longest.inputs)
            return map_batch(longest, operator.itemgetter(chosen))

        def step(batch: Any) -> None:
            run.learner.micro_batch = len(batch.inputs)
            run.position.batch = batch
            next(train(run))
            run.learner.optimizer.zero_grad(set_to_none=True)

        size = min(run.learner.micro_batch, recipe.batch_size)  # before the search changes it
        found = {"largest_micro_batch": largest(lambda size: step(of_size(size)))}
        if workload.length is not None:
            batch = of_size(size)
            unit = math.gcd(*longest.lengths.tolist())  # of which the data's lengths are multiples

            def longer_step(units: int) -> None:
                places = torch.arange(units * unit, device=GPU) % batch.inputs.shape[-1]
                lengths = torch.full_like(batch.lengths, units * unit)
                step(dataclasses.replace(batch, inputs=batch.inputs[..., places], lengths=lengths))

            found["largest_length"] = unit * largest(longer_step, batch.inputs.shape[-1] // unit)
    return found


def largest(step: Callable[[int], object], first: int = 1) -> int:
    """Return the largest number that `step` fits with, within a 32nd and up to LARGEST times `first`, tried first.

    0 where 1 does not fit.
    """
    most = LARGEST * first
    fits, too_large = 0, first
    while too_large <= most and peak_of_step(step, too_large, GPU) is not None:
        fits, too_large = too_large, 2 * too_large
    while too_large <= most and too_large - fits > max(1, fits // 32):
        middle = (fits + too_large) // 2
        if peak_of_step(step, middle, GPU) is None:
            too_large = middle
        else:
            fits = middle
    return fits
