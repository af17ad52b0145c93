"""What follows bad steps, at log points: their cause is told, and training goes on from the last good state."""

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from speedkit.data.augment import augment_batch
from speedkit.errors import SpeedkitError
from speedkit.hardware import this_machine
from speedkit.recipe import learning_rates
from speedkit.train import optimizer
from speedkit.train.guard import BAD, GOOD, OVERFLOW
from speedkit.train.nonfinite import Finding, find

PATIENCE = 5  # steps in a row, bad or far above the usual loss, that are no accident
SPIKE = 10.0  # times the median absolute deviation from the median of good losses; scaled, that of a normal law is 1.48
USUAL, ENOUGH = 100, 20  # good losses remembered; fewer say nothing
RECOVERIES = 5  # of a run; then something is wrong that going back does not cure
LOWEST_RATE = 1 / 8  # of the recipe's; it halves from recovery to recovery
EXPLAINED = 3  # bad steps of a run whose cause is looked for


class Recovery:
    """What the host knows of bad steps, and with on_nonfinite=recover two copies of all that training changes.

    A state is good when a log point is reached after it without a bad step or a spike at its end: training goes back to
    the newest such one, never to one just taken. The copies stay on the device and are made once.
    """

    def __init__(self):
        self.in_row, self.above = 0, 0  # bad steps, and steps far above the usual loss, up to now
        self.first = (0, 0, 0)  # step, epoch, position where those in a row began
        self.losses: list[float] = []  # of good steps
        self.explained = 0
        self.rate, self.precision = 1.0, ""  # times the recipe's learning rate; "" is the plan's
        self.kept: list[tuple[int, dict[str, Tensor]]] = []  # (step, tensors): proven good, and newer
        self.newer = False  # whether the second one is younger than the last recovery

    def start(self, run: Any) -> None:
        """Keep the state that the run starts from."""
        if run.plan.on_nonfinite == "recover" and not self.kept:
            self.kept = [(run.step, {name: value.clone() for name, value in _tensors(run).items()}) for _ in range(2)]

    def read(self, run: Any) -> float:
        """Return the mean loss of the good steps since the last log point; the host waits for the device here.

        Raises SpeedkitError for a bad step, or where those are skipped when they do not end.
        """
        guard, history = run.guard, run.history
        pending = torch.stack(run.pending) if run.pending else torch.empty(0)
        losses = (pending if run.ranks is None or not run.pending else run.ranks.summed(pending)).tolist()
        if losses and not guard.skips and math.isfinite(total := sum(losses)):
            return total / len(losses)
        flags = [GOOD if math.isfinite(loss) else BAD for loss in losses]
        if guard.skips and losses:
            flags = [int(flag) for flag in torch.stack(guard.flags).tolist()]
        median, spread = _usual(self.losses)
        steps = range(run.step - len(losses) + 1, run.step + 1)
        for step, loss, flag, number in zip(steps, losses, flags, guard.places, strict=True):
            epoch, before = divmod(number - 1, len(run.batches))
            place = epoch, before + 1
            if flag == BAD:
                self._bad(run, step, loss, place)
            elif flag == OVERFLOW:
                history.overflows += 1
            else:
                self.in_row = 0
                if loss > median + SPIKE * spread:
                    self.first = self.first if self.above else (step, *place)
                    self.above += 1
                else:
                    self.above, self.losses = 0, [*self.losses[1 - USUAL :], loss]
        if guard.skips and losses:
            self._act(run, len(losses))
        good = [loss for loss, flag in zip(losses, flags, strict=True) if flag == GOOD]
        return sum(good) / len(good) if good else math.nan

    def _bad(self, run: Any, step: int, loss: float, place: tuple[int, int]) -> None:
        if not run.guard.skips:
            raise SpeedkitError(
                f"the loss of step {step} is {loss}: {explain(run, step, place)[0]}; lower learning_rate (now "
                f"{run.recipe.learning_rate:g}), set clip_norm, train in a wider format than "
                f"precision={run.plan.precision}, or leave such steps out with on_nonfinite=skip"
            )
        if not self.in_row:
            self.first = step, *place
        self.in_row += 1
        self.explained += 1
        why = explain(run, step, place)[0] if self.explained <= EXPLAINED else "not looked for"
        epoch, position = place
        run.history.skipped.append({"step": step, "epoch": epoch, "position": position, "why": why})
        if self.explained <= EXPLAINED:
            run.progress.say(f"  step {step} is left out: {why}")

    def _act(self, run: Any, window: int) -> None:
        """Give up, go back, or remember the present state: what was read after `window` steps decides."""
        recovers = run.plan.on_nonfinite == "recover"
        if self.in_row >= (PATIENCE if recovers else max(PATIENCE, window)):
            why = f"{self.in_row} steps in a row are not finite, step {self.first[0]} first"
        elif recovers and self.above >= PATIENCE:
            why = f"the losses of {self.above} steps in a row are far above those before, step {self.first[0]} first"
        else:
            if recovers and not self.in_row and not self.above:
                self._keep(run)
            return
        cause, finding, batch = explain(run, self.first[0], self.first[1:])
        why = f"{why}: {cause}" if self.in_row else why
        if not recovers:
            raise SpeedkitError(f"{why}; on_nonfinite=recover goes back to good weights and lowers the learning rate")
        if len(run.history.recoveries) == RECOVERIES:
            tried = "; ".join(f"at step {one['step']} {one['action']}" for one in run.history.recoveries)
            raise SpeedkitError(f"{why}, after {RECOVERIES} recoveries ({tried}): mend the data or lower learning_rate")
        wider = self._wider(run, batch) if self.in_row and batch is not None else ""
        if run.ranks is not None:
            wider = run.ranks.first(wider) or ""
        self._go_back(run)
        action = f"went back to the state after step {self.kept[0][0]}"
        if wider:
            action += f", precision {run.plan.precision} became {wider}"
            self._change(run, self.rate, wider)
        elif self.in_row and finding is not None and finding.in_data:
            action += ", past the batches that hold it"
        elif self.rate > LOWEST_RATE:
            action += f", learning rate times {self.rate / 2:g}"
            self._change(run, self.rate / 2, self.precision)
        run.history.recoveries.append({"step": run.step, "why": why, "action": action})
        run.progress.say(f"  step {run.step}: {why}; {action}")
        self.in_row = self.above = 0

    def _wider(self, run: Any, batch: Any) -> str:
        """Return the number format in which `batch` is finite with the present weights, "" where float16 is not why."""
        if run.scale is None:
            return ""
        formats = ["fp32"] if this_machine(run.device).why_not("bf16") else ["bf16", "fp32"]
        narrow, *wide = (find(run.model, run.loss_in(name), batch, run.recipe) for name in ("fp16", *formats))
        return next((name for name, found in zip(formats, wide, strict=True) if narrow and not found), "")

    def _change(self, run: Any, rate: float, precision: str) -> None:
        """Go on with `rate` times the recipe's learning rate, and in `precision` unless that is ""."""
        self.rate, self.precision = rate, precision
        if precision:
            run.set_precision(precision)
        table = [rate * entry for entry in learning_rates(run.recipe, run.scheduled)]
        optimizer.set_rate(run.optimizer, table[0])  # a constant schedule never sets it
        run.set_learning_rate = optimizer.schedule(run.optimizer, table, run.guard.steps_done)

    @torch.no_grad()
    def _keep(self, run: Any) -> None:
        """Copy the present state; what was copied before is now proven good."""
        proven, newer = self.kept if not self.newer else reversed(self.kept)
        copies = {
            name: newer[1][name].copy_(value) if name in newer[1] else value.clone()
            for name, value in _tensors(run).items()
        }
        self.kept, self.newer = [proven, (run.step, copies)], True

    @torch.no_grad()
    def _go_back(self, run: Any) -> None:
        """Make the state the proven one. State that the optimizer did not have then is forgotten."""
        kept = self.kept[0][1]
        for index, weight in enumerate(run.parameters):
            if any(f"optimizer.{index}.{key}" not in kept for key in run.optimizer.state.get(weight, ())):
                del run.optimizer.state[weight]
        for name, value in _tensors(run).items():
            value.copy_(kept[name])
        run.guard.left_out = run.step - int(run.guard.steps)
        self.newer = False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return dict(vars(self))

    def load(self, run: Any, state: dict[str, Any]) -> None:
        """Go on from `state`; {} is that of a run which had none."""
        vars(self).update(state)
        if self.rate != 1 or self.precision:
            self._change(run, self.rate, self.precision)


def explain(run: Any, step: int, place: tuple[int, int]) -> tuple[str, Finding | None, Any]:
    """Return where the batch of `step`, from `place` in the data, first is not finite: words, finding, the batch.

    Of several ranks each looks at its own part of the batch, and all return what the first of them found.
    """
    if run.ranks is None:
        return _explained(run, step, place)
    if run.ranks.fsdp:
        return "where from cannot be looked for while weights are sharded: take strategy=ddp for that", None, None
    run.model.zero_grad(set_to_none=True)  # else those of the bad step, which all ranks share, would be found
    own = _explained(run, step, place)
    found = run.ranks.first(own[:2] if own[1] else None)
    return (*found, own[2]) if found else own


def _explained(run: Any, step: int, place: tuple[int, int]) -> tuple[str, Finding | None, Any]:
    try:
        batch, names = run.batches.batch_at(*place)
        own_step = step - 1 + (run.batches.sampler.rank << 40)
        batch = augment_batch(batch, run.workload, run.recipe, step=own_step, generator=torch.Generator(run.device))
        found = find(run.model, run.loss, batch, run.recipe)
        if found is not None and found.where.startswith("the weights") and not run.guard.skips:
            # They learned from the bad step before the host read of it; the batch may be as bad for untrained ones.
            torch.manual_seed(run.recipe.seed)
            found = find(run.workload.model().to(run.device), run.loss, batch, run.recipe)
    except (SpeedkitError, RuntimeError, OSError) as error:
        return f"where from could not be found out ({error})", None, None
    if found is None:
        return "made again, its batch is finite", None, batch
    chosen = [names[sample] for sample in found.samples if len(names) == len(batch[0])]
    return f"{found.where} is not finite first{' for ' if chosen else ''}{', '.join(chosen)}", found, batch


def _usual(losses: list[float]) -> tuple[float, float]:
    """Return median and median absolute deviation; infinite while there are too few losses to know."""
    if len(losses) < ENOUGH:
        return math.inf, 0.0
    median = statistics.median(losses)
    return median, max(statistics.median(abs(loss - median) for loss in losses), 1e-3 * abs(median))


def _tensors(run: Any) -> dict[str, Tensor]:
    """Return all that a step changes, by name: weights, buffers, the optimizer's state, the loss scale, the count."""
    named = {f"model.{name}": value for name, value in (*run.model.named_parameters(), *run.model.named_buffers())}
    for index, weight in enumerate(run.parameters):
        state = run.optimizer.state.get(weight, {})
        named |= {f"optimizer.{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    named |= {f"scale.{name}": value for name, value in (vars(run.scale).items() if run.scale else ())}
    return named | {"steps": run.guard.steps}
