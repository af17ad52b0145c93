"""Handover of a tuning's work: a thread of its own asks for it between a script's steps, and the script's does it.

Only one of the two runs at a time. What a script pushes, its steps, is so pulled by what reads from top to bottom.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
Work = Generator[None, None, Result]  # each `yield` is a step of the script's


class NewRun(Exception):
    """The script ended in the middle of what was asked for."""


class SwitchFailed(Exception):
    """A step failed under what was switched on."""


class Over(Exception):
    """The script makes no more steps."""


class Handover:
    """Hands work from the tuning's thread to the script's, which does it at the end of a step."""

    def __init__(self, tuning: Callable[[], None]) -> None:
        self.tuning = tuning
        self.asked: queue.SimpleQueue[Callable[[], Work[Any]] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self.work: Work[Any] | None = None
        self.thread = threading.Thread(target=self._tune, daemon=True)
        self.error: Exception | None = None  # of the tuning itself
        self.over = False  # no more steps are made
        self.decided = False  # no more are needed
        self.to_the_end = False  # the script is run to its end all the same, without what was switched on
        self.steps = 0

    # ---- the tuning's thread ----

    def _tune(self) -> None:
        try:
            self.tuning()
        except Exception as error:
            self.error = error
        finally:
            self.asked.put(None)

    def ask(self, work: Callable[[], Work[Result]]) -> Result:
        """Return what `work` returns, which goes on at the end of each step, in the script's thread.

        Raises Over where no steps are left, NewRun where the script ends before, and what `work` raises.
        """
        if self.over:
            raise Over
        self.asked.put(work)
        answer, error = self.answers.get()
        if error is not None:
            raise error
        return answer

    # ---- the script's thread ----

    def step_ended(self) -> None:
        """Go on with the work. Raises SystemExit once everything is decided, unless the script is run to its end."""
        self.steps += 1
        if self.thread.ident is None:
            self.thread.start()
        while not self.decided:
            if self.work is None:
                asked = self.asked.get()
                if asked is None:
                    self.decided = True
                    break
                self.work = asked()
            answer: tuple[Any, Exception | None]
            try:
                next(self.work)
                return
            except StopIteration as end:
                answer = (end.value, None)
            except Exception as error:
                answer = (None, error)
            self.work = None
            self.answers.put(answer)
        if not self.to_the_end:
            raise SystemExit(0)

    def interrupt(self, why: Exception) -> None:
        """Answer what is being worked at with an error: the script makes no more steps of it."""
        self.over = isinstance(why, Over)
        if self.work is not None:
            with contextlib.suppress(Exception):
                self.work.close()
            self.work = None
            self.answers.put((None, why))

    def close(self) -> None:
        """Let the tuning come to its end without more steps."""
        self.interrupt(Over())
        while self.thread.is_alive():
            with contextlib.suppress(queue.Empty):
                if self.asked.get(timeout=0.1) is not None:  # asked before it was over
                    self.answers.put((None, Over()))
