"""Where a replica's process lives: as a child of the launcher, or in an actor of a Ray cluster."""

import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pdserve.process import ChildProcess, spawn


class Child(Protocol):
    """A started process. All methods belong to the supervising thread."""

    @property
    def pid(self) -> int | None:
        """Process id while it is known to run; None while it is still being placed."""

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while it runs."""

    def terminate(self) -> None:
        """Asks it to drain and end."""

    def flip(self) -> None:
        """Asks it to drain and go on in the other pool; only where replicas can."""

    def kill(self) -> None:
        """Kills it with all that it started, and waits for the end and the last line."""

    def wait_output(self, timeout_s: float) -> None:
        """Waits for the last line of a child that has ended."""


class Place(Protocol):
    """Starts processes. All methods belong to the supervising thread, which outlives them."""

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        stages: Sequence[Sequence[str]] = (),
    ) -> Child:
        """Starts a process.

        Args:
            name: for messages.
            argv: program and arguments.
            env: variables added to the inherited environment.
            on_line: takes its output, line by line, on another thread.
            stages: what holds pipeline stages that it expects elsewhere. A place of one machine
                leaves them to somebody else.
        """

    def close(self) -> None:
        """Ends what the place itself runs; the children have been killed before."""


class LocalPlace:
    """Children of this process."""

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        stages: Sequence[Sequence[str]] = (),
    ) -> Child:
        """Starts a child process; its stages are started by hand, or by whatever runs them."""
        child = spawn(argv, env=env, stdout=subprocess.PIPE, name=name)
        return LocalChild(child, OutputReader(child, on_line))

    def close(self) -> None:
        """Does nothing: there are only the children."""


class LocalChild:
    """A child of this process."""

    def __init__(self, child: ChildProcess, reader: "OutputReader") -> None:
        """Owns the child."""
        self._child = child
        self._reader = reader

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.pid if self._child.returncode is None else None

    def poll(self) -> int | None:
        """Returns the exit status; None while it runs."""
        return self._child.poll()

    def terminate(self) -> None:
        """Asks it to drain and end."""
        self._child.terminate()

    def flip(self) -> None:
        """Asks it to drain and go on in the other pool."""
        self._child.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kills its process group and waits."""
        self._child.kill()
        self._child.wait()
        # Bounded: a grandchild that was not killed yet may still hold the pipe.
        self.wait_output(2.0)

    def wait_output(self, timeout_s: float) -> None:
        """Waits for the end of its output."""
        self._reader.join(timeout_s)


class OutputReader:
    """A thread that hands on a child's output line by line."""

    def __init__(self, child: ChildProcess, on_line: Callable[[str], None]) -> None:
        """Begins to read; the child was spawned with a pipe."""
        pipe = child.stdout
        assert pipe is not None

        def forward() -> None:
            with pipe:
                for raw in pipe:
                    on_line(raw.decode(errors="replace").rstrip())

        self._thread = threading.Thread(target=forward, name=f"output-{child.name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the output."""
        self._thread.join(timeout_s)
