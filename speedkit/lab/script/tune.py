"""Run a script that nobody edits, tune its loop meanwhile, and leave `tune.json`: what each optimization gave."""

import contextlib
import io
import math
import os
import runpy
import shlex
import sys
from builtins import print  # to which a script may give another meaning
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from torch.optim import optimizer

from speedkit.errors import UsageError
from speedkit.files import claim_folder, finite, write_json
from speedkit.lab.frameworks import change_in_words, lines_of
from speedkit.lab.script.accounting import CHECKPOINTS
from speedkit.lab.script.handover import NewRun, SwitchFailed
from speedkit.lab.script.patches import patch_of
from speedkit.lab.script.places import Place, recorded_places
from speedkit.lab.script.profile import ScriptProfile
from speedkit.lab.script.report import write_script_report
from speedkit.lab.script.run import as_python, check_script
from speedkit.lab.script.tuning import Row, Tuning, tell
from speedkit.lab.script.words import in_sentences
from speedkit.machine import this_machine
from speedkit.measure.profile import SKIP

NEVER_S = 1e6  # without a step, before it is told where a script hangs: it stands still while a tuning thinks
WRITERS = CHECKPOINTS | {  # of weights: module, and name in it
    "torch": "save",
    "safetensors.torch": "serialize_file",
    "lightning.fabric.plugins.io.torch_io": "TorchCheckpointIO.save_checkpoint",
    "lightning_fabric.plugins.io.torch_io": "TorchCheckpointIO.save_checkpoint",
}


class ScriptTuning:
    """A script that is run, and run again where its loop was too short, until its tuning has decided everything."""

    def __init__(self, path: Path, tuning: Tuning, *, keep: bool) -> None:
        self.path = path
        self.tuning = tuning
        self.keep = keep
        self.seen: ScriptProfile
        self.saves_nothing = False
        self.failure = ""  # of the last run, while something was switched on

    def run(self, folder: Path, name: str) -> None:
        """Run the script, whose file has this `name`, until the tuning is over. Raises what it raises by itself."""
        folder_here = os.getcwd()
        process_here = os.getpid()
        while True:
            os.chdir(folder_here)
            self.seen = ScriptProfile(folder, NEVER_S, stop=False)
            self.seen.answered = True  # no first answer: the tuning tells at its end
            steps = self.tuning.handover.steps
            try:
                with (
                    self._saves(),
                    said_once(self.tuning.bench.runs),
                    self.seen.installed(),
                    self.tuning.bench.installed(self.seen),
                ):
                    runpy.run_path(name, run_name="__main__")
                ended: BaseException | None = None
            except (Exception, SystemExit) as error:
                ended = error
            if self.saves_nothing and isinstance(ended, (OSError, EOFError)):  # that come of missing or empty files
                if self.tuning.bench.runs == 1:
                    tell(f"the script misses what was not saved, and ends there: {type(ended).__name__}: {ended}")
                ended = None
            is_fork = os.getpid() != process_here
            if is_fork and self.tuning.bench.runs > 1:
                leave(ended)
            if is_fork or not self._again(ended, self.tuning.handover.steps - steps):
                if ended is not None:
                    raise ended
                return

    def _again(self, ended: BaseException | None, steps: int) -> bool:
        """Return whether the script has to be run again, after a run with so many `steps` that was `ended`."""
        tuning = self.tuning
        handover = tuning.handover
        bench = tuning.bench
        plan = bench.plan
        bench.plan = {}
        handover.to_the_end = False
        if handover.decided or handover.over or not bench.looked:
            return False
        if isinstance(ended, Exception):
            failure = f"{type(ended).__name__}: {ended}"
            if plan and failure != self.failure:  # the same once more would be the script's own
                self.failure = failure
                handover.to_the_end = True  # where it may fail by itself
                handover.interrupt(SwitchFailed(failure))
                return True
            if bench.runs == 1 or steps:
                return False
        if not steps:
            ending = f" ({type(ended).__name__}: {ended})" if ended is not None else ""
            tuning.notes.append(f"the script cannot be run twice in one process{ending}, and its loop was too short")
            raise SystemExit(0)
        if bench.runs == 1:
            bench.run_steps = steps
            tell("the loop was over before all was decided: the script is run again, silently, as often as it takes")
        handover.interrupt(NewRun())
        return True

    def why_nothing(self) -> str:
        """Return why nothing was tried."""
        loop = self.seen.loop
        if loop is not None and not self.tuning.bench.looked and self.tuning.in_time():
            first = len(self.seen.optimizers)
            takes = first + SKIP + loop.observer.needed
            return f"made {first + loop.steps} steps, too few to look at: it takes {takes} in a run"
        return self.seen.too_few() or "was over before anything was tried: give it a longer --budget"

    def record(self) -> Row:
        """Return what `tune.json` holds."""
        tuning = self.tuning
        profile = self.seen.loop
        framework = self.seen.framework
        return {
            "script": self.path.name,
            "framework": framework,
            "device": this_machine(str(profile.device) if profile is not None else "auto").name,
            "steps": tuning.handover.steps,
            "runs": tuning.bench.runs,
            "step_s": tuning.step_s,
            "optimizations": [row | {"in_words": change_in_words(row["change"], framework)} for row in tuning.rows],
            "plan": tuning.kept,
            "in_words": lines_of(tuning.kept, framework),
            "speedup": tuning.speedup,
            "notes": tuning.notes + self.seen.left_out(),
        }

    # ---- what it would save ----

    @contextlib.contextmanager
    def _saves(self) -> Iterator[None]:
        """Let no weights be written inside: what trains there is no training that anybody wants."""
        if self.keep:
            yield
            return
        with contextlib.ExitStack() as stack:
            left = set(WRITERS)

            def skip_those_imported(*_: Any) -> None:
                for module in left & sys.modules.keys():
                    left.remove(module)
                    self._skip(module, stack)

            skip_those_imported()
            stack.callback(optimizer.register_optimizer_step_pre_hook(skip_those_imported).remove)
            yield

    def _skip(self, module: str, stack: contextlib.ExitStack) -> None:
        *path, name = WRITERS[module].split(".")
        owner: Any = sys.modules[module]
        for part in path:
            owner = getattr(owner, part)
        save = getattr(owner, name)

        def skipped(*args: Any, **kwargs: Any) -> Any:
            """Write nothing to a file."""
            if any(isinstance(word, io.BytesIO) for word in args):
                return save(*args, **kwargs)
            if not self.saves_nothing:
                tell("the script saves nothing while it is tuned, for what it learns there is of no use; --keep saves")
            self.saves_nothing = True
            return None

        stack.enter_context(mock.patch.object(owner, name, skipped))


def leave(ended: BaseException | None) -> NoReturn:
    """End a fork of a script that is run again: on Python's way out it would wait for threads that it has not."""
    code = 0 if ended is None else getattr(ended, "code", 1)
    os._exit(code if isinstance(code, int) else bool(code))


@contextlib.contextmanager
def said_once(runs: int) -> Iterator[None]:
    """Let a script, after so many `runs`, say nothing again inside, to wandb's server neither."""
    if not runs:
        yield
        return
    os.environ.setdefault("WANDB_MODE", "offline")
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # a session that has begun reads no variables
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def tune_script(
    path: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    budget_s: float,
    steps: int | None = None,
    keep: bool = False,
) -> None:
    """Run the script at `path` with its own `arguments`, try in its loop what can be switched between two steps.

    Leaves tune.json, report.html and, where something was kept, tune.diff in `out`. It takes about `budget_s`, and at
    most so many `steps`; `keep` lets the script save its weights. A script that fails does so as ever. Raises
    UsageError where there is no such script, or it is one of several ranks.
    """
    check_script(path)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("a script is tuned in one process: start it without torchrun, then train by what was found")
    folder = claim_folder(out.absolute(), "tune")
    job = ScriptTuning(path.absolute(), Tuning(budget_s, steps or math.inf), keep=keep)

    def conclude() -> None:
        """Leave the record of what was found, and say it."""
        job.tuning.handover.close()
        if job.tuning.handover.error is not None:
            raise job.tuning.handover.error
        if not job.tuning.rows:
            tell(f"{path} {job.why_nothing()}")
            return
        record = job.record()
        write_json(folder / "tune.json", finite(record))
        write_script_report(record, folder / "report.html", command=sys.argv[1:])
        told = [*in_sentences(record), f"tune.json and report.html are in {folder}"]
        print("\n".join(told), flush=True)
        for line in leave_patch(job, folder, places):
            print(line, flush=True)

    with recorded_places(job.path.parent) as places, as_python(path, arguments, conclude) as name:
        job.run(folder, name)


def leave_patch(job: ScriptTuning, folder: Path, places: Sequence[Place]) -> list[str]:
    """Write the patch of what was kept, if there is any; return how to apply it, and what it leaves to the author."""
    loop = job.seen.loop
    assert loop is not None
    patch = patch_of(
        job.path,
        job.tuning.kept,
        job.seen.framework,
        places,
        optimizers=list(dict.fromkeys(job.seen.optimizers)),
        loader=loop.loader,
        models=loop.models,
    )
    told = list(patch.by_hand)
    if patch.diff:
        diff = folder.resolve() / "tune.diff"
        diff.write_bytes(patch.diff)
        told.append(f"the lines for it: git -C {shlex.quote(str(patch.root))} apply {shlex.quote(str(diff))}")
    return told
