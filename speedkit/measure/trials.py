"""A tuning's state, saved stage by stage, and its trials: each is predicted, measured, and kept or rejected."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from speedkit.data.sampler import BatchSampler, padded_frames
from speedkit.errors import Interrupted, UsageError, missing_extra
from speedkit.fallbacks import resolve
from speedkit.files import finite, read_json, write_json
from speedkit.machine import Hardware
from speedkit.measure.breakdown import breakdown_of
from speedkit.measure.compare import Comparison, compare
from speedkit.measure.kernels import which_ran
from speedkit.measure.optimizations import Change, Optimization, changed, plan_of, predict, text
from speedkit.measure.peaks import matmul_rates
from speedkit.measure.quality import mean_difference, same_losses
from speedkit.measure.stats import FALSE_KEEP, LOOKS, WORTH, log_ratios, trimmed_mean
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import precision
from speedkit.train.attention import layers_with_lengths
from speedkit.train.compile import COMPILING_S
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

NAME = "tune.json"
VERSION = 5  # of that file, raised when a stage's result becomes another
TRYING_SHARE = 0.6  # of the budget: no optimization is begun after that
COMPARISON_SHARE = 0.1  # of the budget, that a comparison's timed turns may take
CONTROL_PAIRS = 20
BUSY = 1.05  # what two runs of one plan may differ by, and what 80 pairs must be able to tell
Row = dict[str, Any]


class Stage(NamedTuple):
    """A stage of a tuning: its kind, and what it is of."""

    kind: str
    optimization: str = ""
    plan: str = ""  # what it changes of the baseline, or of the best plan so far, in words
    seed: int | None = None
    again: bool = False  # measured a second time, for it was undecided

    def __str__(self) -> str:
        words = [self.kind, self.optimization, self.plan, "" if self.seed is None else f"seed {self.seed}"]
        return ", ".join([*filter(None, words), *["again"] * self.again])


@dataclasses.dataclass(kw_only=True)
class Tuning:
    """A tuning: what is trained, the limits it keeps to, and its results so far."""

    workload: Workload
    recipe: Recipe
    hardware: Hardware
    budget_s: float
    horizon: int  # steps of the training that the plan is for
    pairs: int
    seeds: int
    options: Row  # device and cache_dir, as `fit`, `compare` and `breakdown_of` take them
    out: Path | None
    say: Callable[[str], None]
    began_s: float = dataclasses.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Go on from what is in `out`. Raises UsageError when that is of another version, workload or recipe."""
        about = {"version": VERSION, "workload": self.workload.name, "train": len(self.workload.train)}
        about |= {"recipe": finite(vars(self.recipe))}
        self.state: Row = {"about": about, "stages": [], "measurements": [], "spent_s": 0.0}
        if self.out and (self.out / NAME).exists():
            self.state = read_json(self.out / NAME)
        if self.state.get("about") != about:
            what = "another workload, data set, recipe or version of speedkit"
            raise UsageError(f"{self.out} is of {what}: name another folder with --out")
        self.results: dict[Stage, Any] = {}
        for row in self.state["stages"]:
            result = row.pop("result")
            self.results[Stage(**row)] = result

    def once(self, stage: Stage, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a stage: as it was saved, or else of a call of `function`, which is saved."""
        if stage not in self.results:
            self.results[stage] = finite(function(*arguments, **options))
            if self.out is not None:
                stages = [{**stage._asdict(), "result": result} for stage, result in self.results.items()]
                write_json(self.out / NAME, self.state | {"stages": stages, "spent_s": self.spent_s()})
        return self.results[stage]

    def spent_s(self) -> float:
        """Return the seconds of the budget that are gone, those of earlier sessions included."""
        return self.state["spent_s"] + time.perf_counter() - self.began_s

    @functools.cached_property
    def model(self) -> nn.Module:
        """An untrained model, to see what is in it."""
        return self.workload.model()

    def breakdown(self, plan: Plan) -> Row:
        """Return where a step's time goes under `plan`."""

        def measured() -> Row:
            return breakdown_of(self.workload, self.recipe, plan, **self.options).as_dict()

        return self.once(Stage("breakdown", plan=text(changed(plan))), measured)

    def compare(self, name: str, plans: Mapping[str, Plan], **options: Any) -> Comparison:
        """Compare two plans by name within a share of the budget, and save what was measured."""
        options = {"pairs": self.pairs, "max_s": COMPARISON_SHARE * self.budget_s, **self.options, **options}
        options |= {"recipe": self.recipe, "name": name, "names": tuple(plans)}
        result = compare(self.workload, *plans.values(), **options)
        self.state["measurements"].append(finite(result.as_measurement()))
        return result

    def attempt(self, name: str, plans: Mapping[str, Plan]) -> Comparison | str:
        """Compare two plans; return why where one fails: a model that cannot do this is one more reason not to."""
        try:
            return self.compare(name, plans)
        except Interrupted:
            raise
        except Exception as error:
            return missing_extra(error) or f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def compare_with_itself(job: Tuning) -> Row:
    """Compare the baseline with itself: how busy the machine is, and what another seed makes of the losses."""
    plans, pairs = {"baseline": Plan(), "baseline again": Plan()}, min(job.pairs, CONTROL_PAIRS)
    other_seed = dataclasses.replace(job.recipe, seed=job.recipe.seed + 1)
    control = job.compare("A/A control", plans, recipe_b=other_seed, pairs=pairs, looks=())
    job.say(f"baseline: {control.step_s[0] * 1e3:.1f} ms per step; against itself {control.ratio:.3f}")
    _, reach = trimmed_mean(log_ratios(control.seconds_a, control.seconds_b), FALSE_KEEP)
    resolution = math.exp(reach * math.sqrt(len(control.seconds_a) / LOOKS[-1]))  # of all pairs that there may be
    if max(control.ratio, 1 / control.ratio, resolution) > BUSY:
        job.say(
            f"this machine is busy: a plan compared with itself gives {control.ratio:.2f} ({control.low:.2f} to "
            f"{control.high:.2f}), so a gain below {resolution:.2f} cannot be shown"
        )
    return {"resolution": resolution, "noise": mean_difference(control.losses_b, control.losses_a)}


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    kept: bool = False
    why: str  # it is kept or not; "" while it waits to be tried
    again: bool = False  # measured a second time, for it was undecided

    @property
    def stage(self) -> Stage:
        """The stage of the tuning in which it is tried."""
        return Stage("trial", self.optimization, self.change, again=self.again)


def try_optimizations(job: Tuning, optimizations: Sequence[Optimization], *, noise: float) -> list[Trial]:
    """Try the most promising candidate until none is left or the time is up; return all, tried or not.

    Time that is left goes to those that stayed undecided, once each. `noise` is the difference that another seed makes
    of the losses.
    """
    trials = list[Trial]()
    while True:
        best = plan_of(trial.fields for trial in trials if trial.kept)
        verdicts = {trial.stage: trial.why for trial in trials}
        proposed = candidates(job, optimizations, best)
        undecided = [trial for trial in proposed if verdicts.get(trial.stage) == "undecided"]
        proposed += [dataclasses.replace(trial, again=True) for trial in undecided]
        rest = [trial for trial in proposed if trial.stage not in verdicts]
        # Late in the budget, only trials go on that were measured before the tuning was stopped.
        late = job.spent_s() > TRYING_SHARE * job.budget_s
        waiting = [trial for trial in rest if not trial.why and (not late or trial.stage in job.results)]
        if not waiting:
            break
        first = max(waiting, key=lambda trial: (not trial.again, trial.predicted_low * trial.predicted_high))
        trials.append(Trial(**job.once(first.stage, measure, job, first, best, noise=noise)))
    if late and not trials and not all(trial.why for trial in rest):
        raise UsageError(
            f"a budget of {job.budget_s:.0f} s is too short to try one optimization: give it at least "
            f"{math.ceil(1.5 * job.spent_s() / TRYING_SHARE)} s; --resume goes on from what was measured"
        )
    used_up = "not tried: the time for optimizations is used up"
    return trials + [dataclasses.replace(trial, why=trial.why or used_up) for trial in rest if not trial.again]


def candidates(job: Tuning, optimizations: Sequence[Optimization], best: Plan) -> list[Trial]:
    """Return a trial for each change of the `best` plan; its `why` says why not to try it."""
    rates = job.once(Stage("matmul"), matmul_rates, job.hardware)
    frames = job.once(Stage("frames saved by buckets"), frames_saved, job.workload, job.recipe)
    shares = {row["cause"]: row["share"] for row in job.breakdown(best)["rows"]}
    trials, own = [], job.workload.own_loader is not None
    for optimization in optimizations:
        for fields in optimization.changes(best, job.hardware):
            change = {field: value for field, value in fields.items() if value != getattr(best, field)}
            if not change:
                continue
            formats = (best.precision, change.get("precision", best.precision))
            before, after = (rates.get("fp32" if name == "default" else name) for name in formats)
            low, high = predict(change, shares, frames=frames, matmul=after / before if before and after else 2.0)
            trial = Trial(
                optimization=optimization.name,
                change=text(change),
                fields=change,
                # What a user's data set draws at random, each worker draws anew.
                promises="order-equal" if own and optimization.promises == "bit-equal" else optimization.promises,
                predicted_low=low,
                predicted_high=high,
                why=_why_not(job, best, change, high=high),
            )
            trials.append(trial)
    return trials


def frames_saved(workload: Workload, recipe: Recipe) -> float:
    """Return how many times as many padded frames an epoch has without buckets, by the headers of the files."""
    if workload.length is None:
        return 1.0
    lengths = torch.tensor([workload.length(item) for item in workload.train])
    plain = BatchSampler(len(lengths), recipe.batch_size, recipe.seed)
    return padded_frames(plain, lengths) / padded_frames(dataclasses.replace(plain, lengths=lengths), lengths)


def _why_not(job: Tuning, best: Plan, change: Change, *, high: float) -> str:
    """Return why a change that can make steps `high` times as fast need not be tried, or ""."""
    field, plan = next(iter(change)), dataclasses.replace(best, **change)
    effective = resolve(plan, job.hardware, workload=job.workload, batch_size=job.recipe.batch_size)
    if getattr(effective.plan, field) == getattr(best, field):
        return next(fallback.why for fallback in effective.fallbacks if fallback.field == field)
    if field == "decoder" and best.cache != "off":
        return "features are cached: no file is read any more"
    if math.log(high) < WORTH:
        return f"not tried: it could gain {high:.3f} at most"
    saved_s = job.horizon * job.breakdown(best)["step_s"] * (1 - 1 / high)
    seen = [row for stage, row in job.results.items() if (stage.kind, stage.optimization) == ("trial", "compile")]
    takes_s = max(filter(None, (row["compile_s"] for row in seen)), default=COMPILING_S[job.hardware.device.type])
    if field == "compile" and saved_s < takes_s:
        return (
            f"not tried: compiling takes about {takes_s:.0f} s and would save {saved_s:.0f} s of {job.horizon} "
            "steps at most; for a longer training say --horizon STEPS"
        )
    return _why_not_in_model(job, best, plan, field=field)


def _why_not_in_model(job: Tuning, best: Plan, plan: Plan, *, field: str) -> str:
    """Return what is in the model, or is not, that makes it useless to change `field` of the `best` plan, or ""."""
    if field == "channels_last":
        # A memory format moves weights in four dimensions, and no others.
        if all(weight.dim() != 4 for weight in job.model.parameters()):
            return "the model has no two-dimensional convolution"
        eager_on_cuda = best.compile == "off" and job.hardware.device.type == "cuda"
        if eager_on_cuda and any(isinstance(layer, nn.GroupNorm) for layer in job.model.modules()):
            return "CUDA's group normalisation undoes it in each layer; compiled code, which has its own, may keep it"
    if field == "precision" and plan.precision == "fp8" and not precision.eight_bit_layers(job.model)[0]:
        return "the model has no linear layer that multiplies in 8 bits"
    if field == "attention":
        ran = job.once(Stage("attention", plan=best.precision), attention_kernels, job, best)
        left_alone = f"left alone, PyTorch runs {', '.join(ran) or 'no'} attention here"
        if plan.attention == "varlen" and not layers_with_lengths(job.model):
            return "no layer of the model takes the lengths of clips"
        return "" if ran and plan.attention not in ran else left_alone
    return ""


def attention_kernels(job: Tuning, plan: Plan) -> list[str]:
    """Return the kernels that attention runs by in a step of `plan`, where PyTorch chooses."""
    plan = dataclasses.replace(plan, attention="auto", compile="off")
    with contextlib.closing(setup_run(job.workload, job.recipe, plan, endless=True, **job.options)) as run:
        return sorted({row["kernel"] for row in which_ran(functools.partial(next, steps(run)))})


def measure(job: Tuning, trial: Trial, best: Plan, *, noise: float) -> Row:
    """Measure a candidate against the best plan; return the fields of the trial, with the verdict."""
    job.say(f"{trial.stage}: predicted {trial.predicted_low:.2f} to {trial.predicted_high:.2f}")
    plans = {"best so far": best, trial.change: dataclasses.replace(best, **trial.fields)}
    if compiles := trial.optimization == "compile":
        from torch._inductor.utils import fresh_cache
    with fresh_cache() if compiles else contextlib.nullcontext():  # what compiling takes is part of the answer
        result = job.attempt(str(trial.stage), plans)
    if isinstance(result, str):
        job.say(f"  {result}")
        return vars(trial) | {"why": result}
    # Against the best plan, whose batches or bits need not be the baseline's any more.
    agreement = same_losses(trial.promises, result.losses_b, result.losses_a, noise=noise)
    kept = result.faster and agreement.passed
    why = "faster, and learns the same" if kept else agreement.words if result.faster else result.decision
    job.say(f"  {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f}): {'kept' if kept else 'rejected'}, {why}")
    return vars(trial) | {
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
        "same_losses": agreement.words,
        "step_s_before": result.step_s[0],
        "compile_s": max(0.0, result.warmup_s_b - result.warmup_s_a) if compiles else None,
        "kept": kept,
        "why": why,
    }
