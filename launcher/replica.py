"""One role as a child process: started, restarted, watched, its output forwarded line by line."""

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from launcher.supervision import BackOff, LeaseWatch
from pdserve.process import ChildProcess, spawn

_TAIL_LINES = 20


class Replica:
    """A child that is meant to run for as long as the cluster does.

    All methods belong to the supervising thread, which outlives the child.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        report: Callable[[str], None],
        new_watch: Callable[[float], LeaseWatch] | None = None,
    ) -> None:
        """Remembers how to start the child; `report` takes its lines from a reader thread."""
        self.name = name
        self._argv = tuple(argv)
        self._env = dict(env)
        self._report = report
        self._new_watch = new_watch
        self._back_off = BackOff()
        self._child: ChildProcess | None = None
        self._started_s = 0.0
        self._restart_at_s: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader: threading.Thread | None = None
        self.watch: LeaseWatch | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id while the child runs."""
        child = self._child
        return child.pid if child is not None and child.returncode is None else None

    def start(self) -> None:
        """Starts the child."""
        self._started_s = time.monotonic()
        self._restart_at_s = None
        self.watch = None if self._new_watch is None else self._new_watch(self._started_s)
        self._child = spawn(self._argv, env=self._env, stdout=subprocess.PIPE, name=self.name)
        pipe = self._child.stdout
        assert pipe is not None
        self._reader = threading.Thread(
            target=self._forward, args=(pipe,), name=f"output-{self.name}", daemon=True
        )
        self._reader.start()

    def poll(self) -> int | None:
        """Returns the exit status, or None while the child runs."""
        return None if self._child is None else self._child.poll()

    def revive(self, now_s: float) -> None:
        """Restarts a child that ended, after its back-off; kills one that is frozen."""
        status = self.poll()
        if status is None:
            if self.watch is not None and self.watch.is_frozen(now_s) and self._child is not None:
                self._report(f"{self.name} is alive but holds no lease: killing it")
                self._child.kill()
            return
        if self._restart_at_s is None:
            delay_s = self._back_off.next_delay_s(now_s - self._started_s)
            self._restart_at_s = now_s + delay_s
            ending = describe_status(status)
            self._report(f"{self.name} ended ({ending}); starts again in {delay_s:.2g} s")
        if now_s >= self._restart_at_s:
            self.num_restarts += 1
            self.start()

    def terminate(self) -> None:
        """Asks the child to drain and end."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Kills the child and waits for its end and its last line."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        if self._reader is not None:
            # Bounded: a grandchild that was not killed yet may still hold the pipe.
            self._reader.join(2.0)

    def last_line(self) -> str:
        """Returns the last line the child wrote; call it after the child's end."""
        if self._reader is not None:
            self._reader.join(1.0)
        lines = [line for line in self._tail if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _forward(self, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                # Some lines name their worker already.
                line = raw.decode(errors="replace").rstrip().removeprefix(f"[{self.name}] ")
                self._tail.append(line)
                self._report(f"[{self.name}] {line}")


def describe_status(status: int) -> str:
    """Says in words how a process ended."""
    return f"signal {-status}" if status < 0 else f"status {status}"
