"""How soon `serve` is ready with four workers, and what a worker holds besides its KV blocks.

`python -m benchmarks.startup [float32] [bfloat16]`. The model is in the cache already; each start
is of a new process tree.
"""

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from benchmarks.processes import memory_bytes
from benchmarks.report import Row, write
from launcher.model_source import resolve_model

MODEL = "smollm2-135m"
NUM_RUNS = 3
KV_BYTES = 256 * 2**20
READY_BOUND_S = 10.0
RSS_BOUND_MB = {"bfloat16": 900.0}
WORKLOAD = (
    "`pdserve serve smollm2-135m --prefill 2 --decode 2` from exec to its ready line, model "
    f"cached, median of {NUM_RUNS}; RSS of a rank process after warm-up, which leaves all but 65 "
    "tokens of the KV memory untouched, so not resident. Pss counts pages of the mapped weights "
    "file by share"
)


@contextmanager
def serving(dtype: str) -> Iterator[tuple[psutil.Process, float, list[str]]]:
    """Serves; yields the launcher, seconds until it was ready, and its lines."""
    argv = [sys.executable, "-m", "launcher.cli", "serve", MODEL, "--prefill=2", "--decode=2"]
    argv += [f"--dtype={dtype}", "--port=0", "--http-port=0", f"--kv-cache-memory={KV_BYTES}"]
    argv += ["--log-level=warning"]
    started_s = time.monotonic()
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert child.stderr is not None
    try:
        for line in child.stderr:
            lines.append(line.rstrip())
            if "ready after" in line and "grpc" in line:
                break
        else:
            raise RuntimeError("serve ended:\n" + "\n".join(lines[-20:]))
        yield psutil.Process(child.pid), time.monotonic() - started_s, lines
    finally:
        child.send_signal(signal.SIGTERM)
        child.stderr.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def rank_processes(launcher: psutil.Process) -> list[psutil.Process]:
    """Returns the processes that hold a model."""
    return [one for one in launcher.children(recursive=True) if "--channel-fd" in one.cmdline()]


def measure(dtype: str) -> list[Row]:
    """Starts the cluster several times and looks at its ranks the last time."""
    ready_s: list[float] = []
    phases: list[str] = []
    ranks: list[dict[str, int]] = []
    others: dict[str, int] = {}
    for _ in range(NUM_RUNS):
        with serving(dtype) as (launcher, seconds, lines):
            ready_s.append(seconds)
            phases = lines
            ranks = [memory_bytes(rank.pid) for rank in rank_processes(launcher)]
            others = {
                " ".join(one.cmdline()[1:3]): one.memory_info().rss >> 20
                for one in (launcher, *launcher.children(recursive=True))
                if "--channel-fd" not in one.cmdline()
            }
    rss_mb = statistics.median(rank["Rss"] for rank in ranks) / 1e6
    return [
        Row(
            name=f"{dtype}: serve with 2 + 2 workers ready",
            value=statistics.median(ready_s),
            unit="s",
            bound=READY_BOUND_S,
            details={"runs_s": [round(one, 2) for one in ready_s], "phases": phases[:60]},
        ),
        Row(
            name=f"{dtype}: RSS of a rank besides its KV blocks",
            value=rss_mb,
            unit="MB",
            bound=RSS_BOUND_MB.get(dtype),
            details={
                "ranks_mb": [{key: size // 10**6 for key, size in rank.items()} for rank in ranks],
                "other_processes_mib": others,
            },
        ),
    ]


def main() -> None:
    """Measures the dtypes named on the command line, or both."""
    resolve_model(MODEL)
    names = [name for name in ("float32", "bfloat16") if name in sys.argv[1:]]
    rows: list[Row] = []
    for dtype in names or ("float32", "bfloat16"):
        rows += measure(dtype)
    write("startup" if len(names) != 1 else f"startup-{names[0]}", WORKLOAD, rows)


if __name__ == "__main__":
    main()
