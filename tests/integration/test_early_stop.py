"""A worker that is told to stop while it loads."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.cluster import wait_until
from tests.support.models import tiny_llama_folder  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def test_C15_a_worker_that_still_loads_stops_without_getting_ready(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    argv = ["--worker-id", "d0", "--model", str(tiny_llama_folder), "--kv-cache-memory", "16M"]
    worker = subprocess.Popen(
        # Nobody registers before the rank is ready, so no Redis is needed.
        [sys.executable, "-m", "launcher.roles.decode_worker", *argv, "--redis", "redis://[::1]:1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def is_loading() -> bool:
        children = psutil.Process(worker.pid).children()
        return any("decode_worker.rank" in child.cmdline() for child in children)

    try:
        wait_until(is_loading, 60)
        children = psutil.Process(worker.pid).children()
        worker.send_signal(signal.SIGTERM)
        told, _ = worker.communicate(timeout=60)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 0, told
    assert "ready on" not in told
    assert "Traceback" not in told
    wait_until(lambda: not any(child.is_running() for child in children), 10)
