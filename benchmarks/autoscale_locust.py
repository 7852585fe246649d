"""`pdserve serve --prefill 1..3 --decode 1..3` under locust: pools grow, shrink, and lose nothing.

    python -m benchmarks.autoscale_locust

A tiny model with random weights on the CPU. Prefill steps take 0.25 s more and decode steps 0.03 s
more than they need, so that one replica of each pool does not keep up with the first load, on
however few cores. Without prefix caching, so that each prompt costs its three or four steps.
Questions on long documents of 12 users, then of one.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import RESULTS, machine, versions
from benchmarks.serving_model import make_model_folder
from benchmarks.shapes import TINY
from launcher.control import call_control, find_control
from launcher.held_port import HeldPort
from pdserve.errors import ConfigError
from pdserve.rpc.v1 import control_pb2

ROOT = Path(__file__).resolve().parents[1]
HEAVY_USERS, LIGHT_USERS = 12, 1
HEAVY_S, LIGHT_S = 60, 75
START_LIMIT_S = 180.0
# fmt: off
SERVE = [
    "--prefill", "1..3", "--decode", "1..3", "--ttft-target-s", "2", "--tpot-target-s", "0.2",
    "--max-model-len", "1024", "--max-num-seqs", "4", "--kv-cache-memory", "16M", "--no-http",
    "--prefill-fault", "step_delay_s=0.25", "--decode-fault", "step_delay_s=0.03",
    "--load-format", "dummy", "--no-enable-prefix-caching", "--log-level", "warning",
    "--cluster", "locust",
]
SCALING = [
    "settle_s=15", "burst_memory_s=20", "shrink_pause_s=5", "confirm_s=2", "rate_window_s=10",
    "catch_up_s=10",
]
LOCUST = [
    "--config", "loadtests/headless.conf", "--scenario", "long-document", "--output-tokens", "16",
    "--max-prompt-tokens", "900", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "200",
    "--min-good-share", "0", "--min-requests", "1",
]
# fmt: on


@dataclass
class Watch:
    """What `pdserve serve` says, and what `pdserve scale --status` would show, over time."""

    folder: Path
    started_s: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    sizes: list[dict[str, float]] = field(default_factory=list)
    laws: dict[str, str] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def now_s(self) -> float:
        return round(time.monotonic() - self.started_s, 1)

    def take(self, line: str) -> None:
        self.lines.append(f"{self.now_s():6.1f} s  {line.rstrip()}")

    def look(self) -> None:
        while not self.stopped.wait(1.0):
            try:
                found = call_control(
                    find_control(self.folder, "locust"),
                    lambda stub, key: stub.GetScaling(
                        control_pb2.GetScalingRequest(), timeout=5, metadata=key
                    ),
                )
            except ConfigError:
                continue
            row: dict[str, float] = {"at_s": self.now_s()}
            for pool in found.pools:
                row[f"{pool.role}_serving"] = pool.num_serving
                row[f"{pool.role}_starting"] = pool.num_starting
                if pool.law:
                    self.laws[pool.role] = pool.law
            self.sizes.append(row)


def run_locust(port: int, users: int, seconds: int) -> tuple[int, dict[str, float]]:
    argv = [sys.executable, "-m", "locust", *LOCUST, "--host", f"127.0.0.1:{port}"]
    argv += ["--users", str(users), "--spawn-rate", "6", "--run-time", f"{seconds}s"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    assert lines, done.stderr[-4000:]
    return done.returncode, json.loads(lines[-1])


def main() -> int:
    """Serves, loads, watches and writes; returns 1 if a request failed or a pool stood still."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = make_model_folder(folder / "model", TINY)
        held = HeldPort("127.0.0.1")
        port = held.number
        argv = [sys.executable, "-m", "launcher.cli", "serve", str(model), *SERVE]
        argv += ["--port", str(port)]
        argv += [word for pair in SCALING for word in ("--scaling", pair)]
        watch = Watch(folder / "pdserve")
        server = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": text, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        ready = threading.Event()

        def read() -> None:
            assert server.stderr is not None
            for line in server.stderr:
                watch.take(line)
                if line.startswith("ready after"):
                    ready.set()

        threading.Thread(target=read, daemon=True).start()
        looking = threading.Thread(target=watch.look)
        looking.start()
        try:
            assert ready.wait(START_LIMIT_S), watch.lines
            phases = []
            for users, seconds in ((HEAVY_USERS, HEAVY_S), (LIGHT_USERS, LIGHT_S)):
                began_s = watch.now_s()
                status, figures = run_locust(port, users, seconds)
                phases.append(
                    {"users": users, "from_s": began_s, "to_s": watch.now_s(), "status": status}
                    | figures
                )
        finally:
            watch.stopped.set()
            looking.join()
            server.terminate()
            server.wait(90.0)
            held.close()
    return write(watch, phases)


def write(watch: Watch, phases: list[dict[str, float]]) -> int:
    words = (": grow ", ": shrink ", ": flip ", " drains to become ", " drains for good")
    decisions = [line for line in watch.lines if any(word in line for word in words)]
    largest = {
        role: max(row[f"{role}_serving"] for row in watch.sizes) for role in ("prefill", "decode")
    }
    last = watch.sizes[-1]
    num_failed = sum(phase["failures"] for phase in phases)
    report = {
        "benchmark": "autoscale_locust",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "workload": (__doc__ or "").split("\n\n")[2].replace("\n", " "),
        "serve": [*SERVE, *SCALING],
        "locust": LOCUST,
        "failures": num_failed,
        "largest": largest,
        "phases": phases,
        "decisions": decisions,
        "laws": watch.laws,
        "sizes": watch.sizes,
    }
    path = RESULTS / "autoscale_locust.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(decisions))
    print(json.dumps(phases, indent=1))
    print(f"{num_failed} failed; largest {largest}; last {last}; {path}")
    has_grown = min(largest.values()) > 1
    has_shrunk = all(last[f"{role}_serving"] < size for role, size in largest.items())
    return 0 if num_failed == 0 and has_grown and has_shrunk else 1


if __name__ == "__main__":
    sys.exit(main())
