"""One role as a process: started, restarted, watched, its output forwarded line by line."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from launcher.place import Child, Place
from launcher.supervision import BackOff, LeaseWatch

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
        *,
        place: Place,
        stages: Sequence[Sequence[str]] = (),
    ) -> None:
        """Remembers how to start the child; `report` takes its lines from a reader thread."""
        self._stages = tuple(stages)
        self.name = name
        self._argv = tuple(argv)
        self._env = dict(env)
        self._report = report
        self._new_watch = new_watch
        self._back_off = BackOff()
        self._place = place
        self._child: Child | None = None
        self._started_s = 0.0
        self._restart_at_s: float | None = None
        self._retire_until_s: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.watch: LeaseWatch | None = None
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id while the child runs."""
        child = self._child
        return None if child is None else child.pid

    @property
    def is_retiring(self) -> bool:
        """Whether it drains for good: its end is no failure and it is not started again."""
        return self._retire_until_s is not None

    def start(self) -> None:
        """Starts the child."""
        self._started_s = time.monotonic()
        self._restart_at_s = None
        self.watch = None if self._new_watch is None else self._new_watch(self._started_s)
        self._child = self._place.start(
            self.name, self._argv, self._env, self._take_line, self._stages
        )  # fmt: skip

    def poll(self) -> int | None:
        """Returns the exit status, or None while the child runs."""
        return None if self._child is None else self._child.poll()

    def revive(self, now_s: float) -> None:
        """Restarts a child that ended, after its back-off; kills one that is frozen."""
        status = self.poll()
        if self._retire_until_s is not None:
            if status is None and now_s > self._retire_until_s and self._child is not None:
                self._report(f"{self.name} overstays its drain: killing it")
                self._child.kill()
            return
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

    def flip(self, argv: Sequence[str]) -> None:
        """Lets the child go on in the other pool once it has drained.

        Args:
            argv: what starts it there, should it end.
        """
        self._argv = tuple(argv)
        if self._child is not None:
            self._child.flip()

    def retire(self, until_s: float) -> None:
        """Drains the child for good; `revive` kills it if it is not done by then."""
        if self._retire_until_s is None:
            self._retire_until_s = until_s
            self.terminate()

    def kill(self) -> None:
        """Kills the child and waits for its end and its last line."""
        if self._child is not None:
            self._child.kill()

    def last_line(self) -> str:
        """Returns the last line the child wrote; call it after the child's end."""
        if self._child is not None:
            self._child.wait_output(1.0)
        lines = [line for line in self._tail if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _take_line(self, line: str) -> None:
        # Some lines name their worker already.
        line = line.removeprefix(f"[{self.name}] ")
        self._tail.append(line)
        self._report(f"[{self.name}] {line}")


def describe_status(status: int) -> str:
    """Says in words how a process ended."""
    return f"signal {-status}" if status < 0 else f"status {status}"
