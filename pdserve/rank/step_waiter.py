"""Tells the engine thread that a step has ended, in the same queue as everything else it waits for.

The engine thread waits on its inbox alone, so that what comes while a step runs is taken at once.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from pdserve.engine.batch import PendingStep


class StepOver:
    """The step that was awaited has ended."""


class StepWaiter:
    """A thread that waits for one step after another. `watch` belongs to the engine thread."""

    def __init__(self, post: Callable[[object], None]) -> None:
        """Starts the thread.

        Args:
            post: puts a `StepOver` into the engine's inbox.
        """
        self._post = post
        self._steps: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._watched: PendingStep | None = None
        self._thread = threading.Thread(target=self._run, name="step-waiter", daemon=True)
        self._thread.start()

    def watch(self, step: PendingStep) -> None:
        """Posts one `StepOver` when a step has ended; the same step again changes nothing."""
        if step is not self._watched:
            self._watched = step
            self._steps.put(step)

    def close(self) -> None:
        """Ends the thread, unless the device has stopped and a step never ends."""
        self._steps.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            # What went wrong is raised to the engine thread, when it takes the step's result.
            with contextlib.suppress(Exception):
                step.wait()
            self._post(StepOver())
