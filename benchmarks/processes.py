"""What a process has used so far, and children that end with this one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KEYS = ("Rss", "Pss", "Private_Dirty", "Anonymous")


def cpu_s(pid: int) -> float:
    """Returns user plus system seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@contextmanager
def spread(first_pid: int, second_pid: int) -> Iterator[None]:
    """Gives one process a core, and a second and this one another.

    Left alone, some kernels wake all three on one core while the other idles.
    """
    cores = sorted(os.sched_getaffinity(0))
    _pin(first_pid, cores[0])
    _pin(second_pid, cores[-1])
    _pin(os.getpid(), cores[-1])
    try:
        yield
    finally:
        _pin(os.getpid(), *cores)


def _pin(pid: int, *cores: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may have ended since it was listed.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


def memory_bytes(pid: int) -> dict[str, int]:
    """Returns RSS and its parts; shared pages count once per process in Rss, by share in Pss."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return {key: int(found[key]) * 1024 for key in _KEYS if key in found}


@contextmanager
def running(module: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a module as a child with one OpenMP thread; its stdout is a pipe."""
    child = subprocess.Popen(
        (sys.executable, "-m", module, *arguments),
        stdout=subprocess.PIPE,
        stderr=sys.stderr if "PDSERVE_BENCH_VERBOSE" in os.environ else subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def first_line(child: subprocess.Popen[str], needle: str) -> str:
    """Waits for a line of a child; RuntimeError when it ends without it."""
    assert child.stdout is not None
    for line in child.stdout:
        if needle in line:
            return line
    raise RuntimeError(f"{child.args!r} ended without saying {needle!r}")


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which a share of the others lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
