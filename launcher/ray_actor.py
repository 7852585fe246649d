"""A Ray actor that starts one face, or what holds a stage, and watches and stops it.

No tensor and no request comes here.

The raylet's end ends the actor, the actor's ends the face, and the face's ends its ranks, each by
the parent-death signal of the kernel; Ray alone leaves actors of a killed raylet running for as
long as they are not called (ray 2.60: over 30 s), and their memory taken.
"""

import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from subprocess import PIPE

from launcher.place import OutputReader
from pdserve.process import ChildProcess, die_with_parent, spawn

_MAX_LINES = 64
_MAX_LINE_CHARS = 500
"""One report stays under the 100 KiB up to which Ray answers without its object store."""
_MAX_WAITING_LINES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FaceReport:
    """What became of a face since the last report."""

    status: int | None
    lines: tuple[str, ...]


class FaceActor:
    """Runs one face. Ray calls all methods on the main thread, which lives as long as the actor."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        die_with_parent()
        self._child: ChildProcess | None = None
        self._reader: OutputReader | None = None
        self._lines: deque[str] = deque(maxlen=_MAX_WAITING_LINES)

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> int:
        """Starts the face and returns its process id."""
        assert threading.current_thread() is threading.main_thread(), "see spawn()"
        self._child = spawn(argv, env=env, stdout=PIPE, name=name)
        self._reader = OutputReader(self._child, self._lines.append)
        return self._child.pid

    def report(self) -> FaceReport:
        """Says whether the face runs, and what it wrote; of the last lines none is left out."""
        assert self._child is not None, "start first"
        assert self._reader is not None
        status = self._child.poll()
        if status is not None:
            self._reader.join(1.0)
        lines: list[str] = []
        while self._lines and len(lines) < _MAX_LINES:
            lines.append(self._lines.popleft()[:_MAX_LINE_CHARS])
        return FaceReport(status=None if self._lines else status, lines=tuple(lines))

    def drain(self) -> None:
        """Asks the face to drain and end."""
        if self._child is not None:
            self._child.terminate()

    def flip(self) -> None:
        """Asks the face to drain and go on in the other pool."""
        if self._child is not None:
            self._child.send_signal(signal.SIGUSR1)
