"""The candidates of a tuning: changes of the best plan so far, what each should gain, and why some need no trial."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import nn

from speedkit.data.sampler import BatchSampler
from speedkit.fallbacks import EffectivePlan, resolve
from speedkit.machine import Hardware
from speedkit.measure.contender import padded_frames
from speedkit.measure.kernels import which_ran
from speedkit.measure.optimizations import Change, Optimization, text
from speedkit.measure.peaks import peaks
from speedkit.measure.predict import Gain, computing_gains, predict
from speedkit.measure.roofline import count, format_of_products
from speedkit.measure.stages import TRYING_SHARE, Stage, Tuning
from speedkit.measure.stats import WORTH
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import precision
from speedkit.train.attention import layers_with_lengths
from speedkit.train.compile import COMPILING_S, repeated_blocks
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

# Of the training that a tuning on a GPU is for, at least: what a GPU is bought for is longer than a lesson. From there
# on compiling is always tried, and the payback says when it is earned.
GPU_HORIZON = 20_000


@dataclasses.dataclass(kw_only=True)
class Trial:
    """One change of the best plan: what it should gain, what it did where it was tried, and whether it is kept."""

    optimization: str
    change: str
    fields: Change
    promises: str
    predicted_low: float
    predicted_high: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    same_losses: str | None = None
    step_s_before: float | None = None
    compile_s: float | None = None
    pays_from_step: int | None = None  # of a training: what compiling takes is earned by then
    may_pay: bool = True  # in the training that the tuning is for
    kept: bool = False
    why: str  # it is kept or not; "" while it waits to be tried
    again: bool = False  # measured a second time, for it was undecided

    @property
    def stage(self) -> Stage:
        """The stage of the tuning in which it is tried."""
        return Stage("trial", self.optimization, self.change, again=self.again)

    @property
    def compiles(self) -> bool:
        """Whether trying it compiles code."""
        return "compile" in self.fields or "compile_scope" in self.fields

    @property
    def joint(self) -> bool:
        """Whether it compiles too, without which what it is about may not show."""
        return "compile" in self.fields and self.optimization != "compile"


def horizon_of(recipe: Recipe, items: int, hardware: Hardware) -> int:
    """Return the steps of the training that a tuning is for, where nobody says: the recipe's over `items`."""
    steps = recipe.total_steps(items)
    return steps if hardware.device.type == "cpu" else max(steps, GPU_HORIZON)


def candidates(job: Tuning, optimizations: Sequence[Optimization], best: Plan) -> list[Trial]:
    """Return a trial for each change of the `best` plan; its `why` says why not to try it."""
    stage = Stage("computing", plan=best.precision)
    gains = job.once(stage, gains_of, job.workload, job.recipe, best, hardware=job.hardware)
    frames = job.once(Stage("frames saved by buckets"), frames_saved, job.workload, job.recipe)
    breakdown = job.breakdown(best)
    shares = {row["cause"]: row["share"] for row in breakdown["rows"]}
    baseline_s = job.horizon * breakdown["step_s"]
    trials = []
    for optimization in optimizations:
        promises = optimization.promises
        if job.workload.own_loader is not None and promises == "bit-equal":
            promises = "order-equal"  # what a user's data set draws at random, each worker draws anew
        for fields in optimization.changes(best, job.hardware):
            change = {field: value for field, value in fields.items() if value != getattr(best, field)}
            if not change:
                continue
            low, high = predict(change, shares, frames=frames, gains=gains)
            trial = Trial(
                optimization=optimization.name,
                change=text(change),
                fields=change,
                promises=promises,
                predicted_low=low,
                predicted_high=high,
                why=_why_not(job, best, change, high=high),
            )
            if trial.compiles:
                trial.may_pay = baseline_s * (1 - 1 / high) >= compiling_s(job)
                if not trial.why and trial.stage not in job.results:
                    trial.why = _why_no_time(job)
            trials.append(trial)
    return trials


def gains_of(workload: Workload, recipe: Recipe, plan: Plan, *, hardware: Hardware) -> dict[str, Gain]:
    """Return what changes of `plan` make of what computes, by a step's operators and the peaks of this machine."""
    operators = count(workload, recipe, plan, device=hardware.device)
    limits = {name: peak.value for name, peak in peaks(hardware).items()}
    return computing_gains(operators, limits, format_of_products(plan.precision, operators, hardware.device))


def compiling_s(job: Tuning) -> float:
    """Return the seconds that compiling takes: the most that it took so far in this tuning."""
    seen = [result.get("compile_s") for stage, result in job.results.items() if stage.kind == "trial"]
    return max(filter(None, seen), default=COMPILING_S[job.hardware.device.type])


def frames_saved(workload: Workload, recipe: Recipe) -> float:
    """Return how many times as many padded frames an epoch has without buckets, by the headers of the files."""
    if workload.length is None:
        return 1.0
    lengths = torch.tensor([workload.length(item) for item in workload.train])
    plain = BatchSampler(len(lengths), recipe.batch_size, recipe.seed)
    buckets = dataclasses.replace(plain, lengths=lengths, of_frames=workload.of_frames)
    return padded_frames(plain, lengths) / padded_frames(buckets, lengths)


# ---- why a change need not be tried ----


def _why_not(job: Tuning, best: Plan, change: Change, *, high: float) -> str:
    """Return why a change that can make steps `high` times as fast need not be tried, or ""."""
    field = next(iter(change))
    plan = dataclasses.replace(best, **change)
    effective = resolve(plan, job.hardware, workload=job.workload, batch_size=job.recipe.batch_size)
    if why := _why_refused(effective, best, change) or _why_not_decoder(job, best, change):
        return why
    if math.log(high) < WORTH:
        return f"not tried: it could gain {high:.3f} at most"
    if change.get("compile_scope") == "blocks" and not _blocks_share_code(job.model):
        return "most of the model's blocks have shapes of their own: compiling them makes no less code than the model"
    # A memory format moves weights in four dimensions, and no others.
    if field == "channels_last" and all(weight.dim() != 4 for weight in job.model.parameters()):
        return "the model has no two-dimensional convolution"
    if field == "attention":
        return _why_not_attention(job, best, plan.attention)
    if plan.precision == "fp8" != best.precision and not precision.eight_bit_layers(job.model)[0]:
        return "the model has no linear layer that multiplies in 8 bits"
    return ""


def _blocks_share_code(model: nn.Module) -> bool:
    """Return whether the repeated blocks of a model have half as many shapes as there are blocks, or fewer."""
    blocks = repeated_blocks(model)
    shapes = {tuple(weight.shape for weight in block.parameters()) for block in blocks}
    return 0 < 2 * len(shapes) <= len(blocks)


def _why_refused(effective: EffectivePlan, best: Plan, change: Change) -> str:
    """Return why machine and data leave nothing of what a change is about, or of the compiling that goes with it."""
    field = next(iter(change))
    for fallback in effective.fallbacks:
        nothing = fallback.field == "attention" or fallback.got == getattr(best, fallback.field)
        if nothing and fallback.field in change and fallback.field in (field, "compile"):
            return fallback.why
    return ""


def _why_not_decoder(job: Tuning, best: Plan, change: Change) -> str:
    if "decoder" not in change:
        return ""
    if change["decoder"] not in job.workload.decoders:
        return "no other decoder reads the items of this workload"
    if best.cache != "off":
        return "features are cached: no file is read any more"
    return ""


def _why_no_time(job: Tuning) -> str:
    """Return why there is no time to measure what compiling gives, or "": on a GPU it is always measured."""
    takes_s = compiling_s(job)
    left_s = TRYING_SHARE * job.budget_s - job.spent_s()
    if takes_s <= left_s or job.hardware.device.type == "cuda":
        return ""
    budget_s = math.ceil((job.spent_s() + takes_s) / TRYING_SHARE)
    return f"not tried: compiling takes about {takes_s:.0f} s; --budget {budget_s} has room for it"


def _why_not_attention(job: Tuning, best: Plan, kernel: str) -> str:
    ran = job.once(Stage("attention", plan=best.precision), attention_kernels, job, best)
    if kernel == "varlen" and not layers_with_lengths(job.model):
        return "no layer of the model takes the lengths of clips"
    if not ran or kernel in ran:
        return f"left alone, PyTorch runs {', '.join(ran) or 'no'} attention here"
    return ""


def attention_kernels(job: Tuning, plan: Plan) -> list[str]:
    """Return the kernels that attention runs by in a step of `plan`, where PyTorch chooses."""
    plan = dataclasses.replace(plan, attention="auto", compile="off")
    with contextlib.closing(setup_run(job.workload, job.recipe, plan, endless=True, **job.options)) as run:
        ran = which_ran(functools.partial(next, steps(run)))
    return sorted({row["kernel"] for row in ran})
