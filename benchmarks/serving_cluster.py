"""A cluster started by the command line, as a user starts it, and the client process beside it."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.processes import cpu_s
from benchmarks.serving_load import Answered, LoadPoint

_HTTP = re.compile(r"http http://(\S+)")
_STOP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What came of a load point."""

    answered: tuple[Answered, ...]
    seconds: float
    client_cpu_s: float
    cpu_s: dict[str, float]
    """Of the cluster's processes meanwhile, by role."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(sum(one.num_tokens) for one in self.answered)


@dataclass
class Served:
    """A running `pdserve serve`."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    """What it wrote to stderr."""
    address: str | None = None
    """host:port of its HTTP front."""
    seconds: float = 0.0
    """Until it was ready."""
    _is_told: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Collects lines until the end; on a thread of its own."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = _HTTP.search(line)
            if "ready after" in line and found:
                self.address = found[1]
                self._is_told.set()
        self._is_told.set()

    def wait_ready(self, timeout_s: float) -> str:
        """Waits until it serves and returns where.

        Raises:
            RuntimeError: it ended, or takes too long.
        """
        self._is_told.wait(timeout_s)
        if self.address is None:
            raise RuntimeError("pdserve serve is not ready:\n" + "\n".join(self.lines[-40:]))
        return self.address


@contextmanager
def serving(
    folder: Path, *flags: str, num_prefill: int, num_decode: int, ready_timeout_s: float = 240.0
) -> Iterator[Served]:
    """Runs a cluster of dummy weights, on GPUs unless `flags` say otherwise."""
    command = (
        *(sys.executable, "-m", "launcher.cli", "serve", str(folder)),
        *("--device", "cuda", "--load-format", "dummy", "--port", "0", "--http-port", "0"),
        *("--prefill", str(num_prefill), "--decode", str(num_decode)),
        *("--ready-timeout-s", str(ready_timeout_s), "--log-level", "warning", *flags),
    )
    started_s = time.monotonic()
    served = Served(
        subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    )
    reader = threading.Thread(target=served.read, daemon=True)
    reader.start()
    try:
        served.wait_ready(ready_timeout_s)
        served.seconds = time.monotonic() - started_s
        yield served
    finally:
        served.process.terminate()
        try:
            served.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            # A second signal ends it at once, with all its children.
            served.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                served.process.wait(_STOP_S)
            served.process.kill()
        reader.join(5.0)


class LoadClient:
    """The client process of one cluster."""

    def __init__(self, address: str, launcher_pid: int) -> None:
        """Starts it.

        Args:
            address: host:port of the cluster's HTTP front.
            launcher_pid: the process above all of the cluster's.
        """
        self._launcher_pid = launcher_pid
        self._process = subprocess.Popen(
            (sys.executable, "-m", "benchmarks.serving_load", address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, point: LoadPoint) -> LoadResult:
        """Sends a load point's requests and waits for all answers.

        Raises:
            RuntimeError: the client ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        processes = find_roles(self._launcher_pid)
        before = {pid: cpu_s(pid) for pid in processes}
        started_s = time.monotonic()
        self._process.stdin.write(json.dumps(asdict(point)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load client ended")
        used: dict[str, float] = {}
        for pid, role in processes.items():
            with contextlib.suppress(OSError):  # one that was killed meanwhile
                used[role] = used.get(role, 0.0) + cpu_s(pid) - before[pid]
        answer = json.loads(line)
        return LoadResult(
            answered=tuple(Answered(**one) for one in answer["requests"]),
            seconds=time.monotonic() - started_s,
            client_cpu_s=answer["cpu_s"],
            cpu_s=used,
        )

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@contextmanager
def loading(served: Served) -> Iterator[LoadClient]:
    """Runs a client beside a cluster."""
    assert served.address is not None
    client = LoadClient(served.address, served.process.pid)
    try:
        yield client
    finally:
        client.close()


def find_roles(parent: int) -> dict[int, str]:
    """Returns the pids of a launcher's descendants and what each of them is."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    waiting = [parent]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            waiting.append(pid)
            with contextlib.suppress(OSError):
                command = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
                found[pid] = _role_of(command)
    return found


def _role_of(command: Sequence[str]) -> str:
    if "-m" not in command:
        return "other"
    module = command[command.index("-m") + 1]
    return module.removeprefix("launcher.roles.")
