"""The launcher killed while the cluster is at work, or left by whoever reads what it writes."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from launcher.client import Generation, generate_stream, get_loads, open_sync_channel
from pdserve.process import is_running
from tests.support.cluster import wait_until
from tests.support.faults import Plan, random_plan
from tests.support.models import tiny_llama_folder  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
_RNG = random.Random(31)
PLANS = [random_plan(_RNG, 200, 80, is_greedy=number % 2 == 0) for number in range(4)]


class Served:
    """A `pdserve serve` in a process of its own, and the last lines that it wrote."""

    def __init__(self, folder: Path, *, reads_on: bool = True) -> None:
        self._reads_on = reads_on
        flags = ["--port", "0", "--no-http", "--kv-cache-memory", "16M", "--max-model-len", "512"]
        flags += ["--decode-fault", "step_delay_s=0.02", "--decode", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", "serve", str(folder), *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self._address() is not None, 60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            for line in pipe:
                self.lines.append(line.rstrip())
                if not self._reads_on and self._address() is not None:
                    return  # and the pipe is closed, as `head` does

    def _address(self) -> str | None:
        for line in list(self.lines):
            if line.startswith("ready after") and ": grpc " in line:
                return line.split(": grpc ")[1].split(",")[0].strip()
        return None

    @property
    def address(self) -> str:
        address = self._address()
        assert address is not None
        return address

    def pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def generate(self, plan: Plan, first_text: threading.Event | None = None) -> Generation:
        with open_sync_channel(self.address) as channel:
            return generate_stream(
                channel,
                plan.request(),
                timeout_s=40.0,
                on_text=lambda _: None if first_text is None else first_text.set(),
            )


@pytest.fixture
def served(tiny_llama_folder: Path) -> Iterator[Served]:  # noqa: F811
    served = Served(tiny_llama_folder)
    yield served
    served.process.kill()
    served.process.wait()


def start_streams(served: Served, pool: ThreadPoolExecutor) -> list[Future[Generation]]:
    """Starts all plans and returns once each of them has shown text."""
    begun = [threading.Event() for _ in PLANS]
    streams = [
        pool.submit(served.generate, plan, event) for plan, event in zip(PLANS, begun, strict=True)
    ]
    assert all(event.wait(60.0) for event in begun)
    return streams


def test_C10_launcher_killed_under_load_leaves_no_process_not_even_a_frozen_one(
    served: Served,
) -> None:
    pids = served.pids()
    # Redis, the router, and a face and a rank for each of three workers.
    assert len(pids) == 2 + 2 * 3
    with open_sync_channel(served.address) as channel:
        workers = {worker.worker_id: worker for worker in get_loads(channel)}
    with ThreadPoolExecutor(len(PLANS)) as pool:
        streams = start_streams(served, pool)
        psutil.Process(workers["decode-0"].rank_pids[0]).send_signal(signal.SIGSTOP)
        psutil.Process(workers["decode-1"].face_pid).send_signal(signal.SIGSTOP)
        served.process.kill()
        served.process.wait()
        wait_until(lambda: not any(is_running(pid) for pid in pids), 10)
        assert all(stream.exception(10.0) is not None for stream in streams)


@pytest.mark.soak
def test_a_cluster_whose_lines_nobody_reads_any_more_serves_on_and_ends_well(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    served = Served(tiny_llama_folder, reads_on=False)
    try:
        address = served.address
        with open_sync_channel(address) as channel:
            (prefill,) = [one for one in get_loads(channel) if one.worker_id == "prefill-0"]
            # The launcher and the new replica write about this.
            psutil.Process(prefill.rank_pids[0]).send_signal(signal.SIGKILL)
            wait_until(lambda: not is_running(prefill.rank_pids[0]), 10)

            def is_back() -> bool:
                return any(
                    one.worker_id == "prefill-0" and one.rank_pids != prefill.rank_pids
                    for one in get_loads(channel)
                )

            wait_until(is_back, 60)
        assert len(served.generate(PLANS[0]).token_ids) > 0
        served.process.terminate()
        assert served.process.wait(60.0) == 0
    finally:
        served.process.kill()
        served.process.wait()
