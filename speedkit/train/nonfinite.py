"""Steps that are not finite: left out on the device, explained and rolled back at log points.

`StepGuard` acts in every step and never makes the host wait; `Recovery` acts at log points, where the host reads the
losses anyway; `locate_nonfinite` finds the module and the samples in which NaN or infinity appears first.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils import _pytree as tree

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Batch, Loss

if TYPE_CHECKING:
    from speedkit.train.run import TrainingRun

GOOD, OVERFLOW, BAD = 0, 1, 2  # what a step can be; of several ranks the worst counts
PATIENCE = 5  # bad steps in a row that are no accident
RECOVERIES = 3  # of a run; then something is wrong that going back does not cure
EXPLAINED = 3  # bad steps of a run whose cause is looked for
MANY_SAMPLES = 8  # bad samples of a batch; there is no need to find more


class StepGuard:
    """Keeps a step whose loss or gradient norm is not finite from changing weights, optimizer state or buffers.

    A fused optimizer reads `found_inf` and leaves the step out by itself, so the host never waits; for another one the
    host reads the verdict and drops the gradients. Gradients that overflow float16 while the loss is finite are no bad
    step: GradScaler leaves the step out and lowers the scale.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, *, several_ranks: bool = False):
        device = next(model.parameters()).device
        self.skips = plan.on_nonfinite != "raise"
        self.scaled = plan.precision == "fp16"
        self.active = self.skips or self.scaled  # else no step is ever left out, and none need be judged
        self.fused, self.optimizer, self.several_ranks = plan.fused_optimizer, optimizer, several_ranks
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.found_inf = torch.zeros((), device=device)
        if self.skips and self.fused and not self.scaled:  # GradScaler sets its own
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.left_out = 0  # steps that the host left out, where it reads the verdict
        self.verdicts: list[Tensor] = []  # GOOD, OVERFLOW or BAD of each step since the last log point
        self.buffers = list(model.buffers())
        self.buffers_before = [buffer.clone() for buffer in self.buffers]
        self.random_state: list[Tensor] = []

    def before_step(self) -> None:
        """Remember what even a bad forward pass changes: BatchNorm's statistics, and the random state."""
        self.random_state = get_random_state(self.found_inf.device)
        if self.buffers:
            torch._foreach_copy_(self.buffers_before, self.buffers)

    def restore(self) -> None:
        """Make buffers and random state those before the step, so that it can be repeated."""
        if self.random_state:
            set_random_state(self.random_state, self.found_inf.device)
        if self.buffers:
            torch._foreach_copy_(self.buffers, self.buffers_before)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> None:
        """Find out whether the step is finite, by its `loss []` and gradient `norm []`, neither scaled nor clipped."""
        overflow = (norm.isfinite().logical_not()) * float(OVERFLOW if self.scaled else BAD)
        verdict = torch.where(loss.isfinite(), overflow, float(BAD))
        if self.several_ranks:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MAX)
        self.found_inf.copy_(verdict != GOOD)
        self.verdicts.append(verdict)
        if not self.fused and verdict != GOOD:  # the host waits for the device here
            self.optimizer.zero_grad(set_to_none=True)  # the optimizer finds nothing to do
            self.left_out += 1

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the step if it was good, else put the buffers back."""
        good = self.found_inf == 0
        self.good_steps += good
        for before, buffer in zip(self.buffers_before, self.buffers, strict=True):
            torch.where(good, buffer, before, out=buffer)


class Recovery:
    """What the host knows of bad steps, and with on_nonfinite=recover a copy of the last good state.

    The copy stays on the device. It is taken at log points whose last step was good, and training goes back to it,
    with half the learning rate, after PATIENCE bad steps in a row.
    """

    def __init__(self) -> None:
        self.bad_in_row = 0
        self.first_bad = (0, 0, 0)  # step, epoch, position where those in a row began
        self.explained = 0
        self.rate = 1.0  # times the recipe's learning rate
        self.snapshot: dict[str, Tensor] = {}
        self.snapshot_step = 0

    def read(self, run: "TrainingRun") -> float:
        """Return the mean loss of the good steps since the last log point; the host waits for the device here.

        Raises SpeedkitError for a bad step, or where those are left out when they do not end.
        """
        losses = run.read_losses()
        verdicts = [GOOD if math.isfinite(loss) else BAD for loss in losses]
        if run.guard.skips and losses:
            verdicts = [int(verdict) for verdict in torch.stack(run.guard.verdicts).tolist()]
        run.guard.verdicts.clear()
        first_step = run.step - len(losses) + 1
        for offset, (loss, verdict) in enumerate(zip(losses, verdicts, strict=True)):
            if verdict == BAD:
                self._note_bad_step(run, first_step + offset, loss, run.positions[offset])
            elif verdict == GOOD:
                self.bad_in_row = 0
        if run.guard.skips and losses:
            self._act(run, len(losses))
        good = [loss for loss, verdict in zip(losses, verdicts, strict=True) if verdict == GOOD]
        return sum(good) / len(good) if good else math.nan

    def _note_bad_step(self, run: "TrainingRun", step: int, loss: float, position: tuple[int, int]) -> None:
        if not run.guard.skips:
            raise SpeedkitError(
                f"the loss of step {step} is {loss}: {explain(run, step, position)}; lower learning_rate (now "
                f"{run.recipe.learning_rate:g}), set clip_norm, train in a wider format than "
                f"precision={run.plan.precision}, or leave such steps out with on_nonfinite=skip"
            )
        if not self.bad_in_row:
            self.first_bad = step, *position
        self.bad_in_row += 1
        self.explained += 1
        why = "not looked for"
        if self.explained <= EXPLAINED:
            why = explain(run, step, position)
            run.progress.say(f"  step {step} is left out: {why}")
        run.history.skipped.append({"step": step, "epoch": position[0], "position": position[1], "why": why})

    def _act(self, run: "TrainingRun", window: int) -> None:
        """Give up, go back, or remember the present state."""
        recovers = run.plan.on_nonfinite == "recover"
        if self.bad_in_row < (PATIENCE if recovers else max(PATIENCE, window)):
            if recovers and not self.bad_in_row:
                self.take_snapshot(run)
            return
        step, *position = self.first_bad
        why = f"{self.bad_in_row} steps in a row are not finite, step {step} first: "
        why += explain(run, step, (position[0], position[1]))
        if not recovers:
            raise SpeedkitError(f"{why}; on_nonfinite=recover goes back to good weights and lowers the learning rate")
        if len(run.history.recoveries) == RECOVERIES:
            raise SpeedkitError(f"{why}, after {RECOVERIES} recoveries: mend the data or lower learning_rate")
        self._roll_back(run)
        action = f"went back to the state after step {self.snapshot_step}, learning rate times {self.rate:g}"
        run.history.recoveries.append({"step": run.step, "why": why, "action": action})
        run.progress.say(f"  step {run.step}: {why}; {action}")

    @torch.no_grad()
    def take_snapshot(self, run: "TrainingRun") -> None:
        """Copy all that training changes, over the copy before."""
        self.snapshot_step = run.step
        for name, value in training_state(run).items():
            if name in self.snapshot:
                self.snapshot[name].copy_(value)
            else:
                self.snapshot[name] = value.clone()

    @torch.no_grad()
    def _roll_back(self, run: "TrainingRun") -> None:
        """Make the state that of the snapshot. State that the optimizer did not have then is forgotten."""
        for index, weight in enumerate(run.parameters):
            if any(f"optimizer.{index}.{key}" not in self.snapshot for key in run.optimizer.state.get(weight, ())):
                del run.optimizer.state[weight]
        for name, value in training_state(run).items():
            value.copy_(self.snapshot[name])
        run.guard.left_out = 0 if run.guard.fused else run.step - int(run.guard.good_steps)
        self.rate /= 2
        self.bad_in_row = 0


def training_state(run: "TrainingRun") -> dict[str, Tensor]:
    """Return all that a step changes, by name: weights, buffers, the optimizer's state, the count of good steps."""
    state = {f"model.{name}": value for name, value in run.model.state_dict(keep_vars=True).items()}
    for index, weight in enumerate(run.parameters):
        values = run.optimizer.state.get(weight, {})
        state |= {f"optimizer.{index}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return state | {"good_steps": run.guard.good_steps}


@dataclasses.dataclass(frozen=True)
class NonFiniteReport:
    """The first value that is not finite, in words, and the samples of the batch in which it appears by themselves."""

    where: str
    samples: list[int]


def explain(run: "TrainingRun", step: int, position: tuple[int, int]) -> str:
    """Return where the batch of `step`, at `position` (epoch, batch) of the data, first is not finite.

    Of several ranks each looks at its own part of the batch, and all return what the first of them found.
    """
    if run.ranks is not None and run.ranks.sharded:
        return "where from cannot be looked for while weights are sharded: take strategy=ddp for that"
    run.model.zero_grad(set_to_none=True)  # else those of the bad step, which all ranks share, would be found
    why = _explain_own(run, step, position)
    why = why if run.ranks is None else run.ranks.first_not_none(why)
    return why or "made again, its batch is finite"


def _explain_own(run: "TrainingRun", step: int, position: tuple[int, int]) -> str | None:
    try:
        batch, names = run.train_batches.batch_at(*position)
        if batch is None:
            return "none of its items can be read again"
        batch = run.augment(batch, step - 1)
        with run.eager():
            report = locate_nonfinite(run.model, run.plain_loss, batch, run.recipe)
            if report is not None and report.where.startswith("the weights") and not run.guard.skips:
                # They learned from the bad step before the host read of it; the batch may be as bad for new ones.
                torch.manual_seed(run.recipe.seed)
                report = locate_nonfinite(run.workload.model().to(run.device), run.plain_loss, batch, run.recipe)
    except (SpeedkitError, RuntimeError, OSError) as error:
        return f"where from could not be found out ({error})"
    if report is None:
        return None
    chosen = [names[sample] for sample in report.samples if len(names) == len(batch[0])]
    return f"{report.where} is not finite first{' for ' if chosen else ''}{', '.join(chosen)}"


def locate_nonfinite(model: nn.Module, loss: Loss, batch: Batch, recipe: Recipe) -> NonFiniteReport | None:
    """Learn from `batch`, tensors [B, ...], once more with hooks on; return None when all of it is finite.

    The model, its buffers and the random state stay as they are; gradients are gone. The samples are found by halving
    the batch, in evaluation mode: there they do not depend on each other. This waits for the device again and again.
    """
    finite = torch.stack([tensor.reshape(len(tensor), -1).isfinite().all(1) for tensor in batch]).all(0)  # [B]
    if bad := finite.logical_not().nonzero().flatten().tolist():
        return NonFiniteReport("the batch itself", bad[:MANY_SAMPLES])
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if broken:
        return NonFiniteReport(f"the weights, {broken[0]} first", [])
    with _restoring(model, batch[0].device):
        where = first_nonfinite(model, loss, batch, recipe)
        if not where:
            return None
        model.eval()

        def is_bad(samples: list[int]) -> bool:
            return bool(first_nonfinite(model, loss, tuple(tensor[samples] for tensor in batch), recipe))

        return NonFiniteReport(where, _bad_samples(is_bad, list(range(len(batch[0]))))[:MANY_SAMPLES])


def first_nonfinite(model: nn.Module, loss: Loss, batch: Batch, recipe: Recipe) -> str:
    """Return the first output of a module or, where the loss is finite, the first gradient that is not; "" for none."""
    places: list[str] = []

    def look_at(tensor: Tensor, place: str) -> None:
        if not tensor.isfinite().all():
            places.append(place)

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                look_at(tensor, f"the output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(look_at, place=f"the gradient at the output of {name}"))

    handles = [
        module.register_forward_hook(functools.partial(hook, name or type(module).__name__))
        for name, module in model.named_modules()
    ]
    try:
        value, _ = loss(model, batch, recipe)
        if not value.isfinite():
            return [*places, "the loss"][0]
        places.clear()  # an output that the loss does not depend on
        value.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        for name, gradient in gradients.items():
            look_at(gradient, f"the gradient of {name}")
        look_at(nn.utils.get_total_norm(gradients.values()), "the norm of the gradients")
        return next(iter(places), "")
    finally:
        model.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()


def _bad_samples(is_bad: Callable[[list[int]], bool], samples: list[int]) -> list[int]:
    """Return the first of the `samples` that are bad by themselves, found by halving; at least MANY_SAMPLES, if any."""
    if not is_bad(samples):
        return []
    if len(samples) == 1:
        return samples
    half = len(samples) // 2
    bad = _bad_samples(is_bad, samples[:half])
    return bad if len(bad) >= MANY_SAMPLES else bad + _bad_samples(is_bad, samples[half:])


@contextlib.contextmanager
def _restoring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put modes, buffers and the random state back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for buffer, before in buffers:
                buffer.copy_(before)


def get_random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the global random generators that training on `device` draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    """Set them as `get_random_state` returned them."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
