"""`pdserve serve` and `pdserve demo` as a user runs them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.client import Generation, generate_stream, get_loads, open_sync_channel
from pdserve.errors import NoWorker
from pdserve.process import is_running
from tests.support.cluster import make_request, wait_until
from tests.support.models import tiny_llama_folder  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


class Served:
    """A running `pdserve serve` and what it has written so far."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli", "serve", *argv],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            for line in pipe:
                self.lines.append(line.rstrip())

    def wait_ready(self) -> str:
        """Returns the router's address."""
        wait_until(lambda: self._ready_line() is not None or not self.reader.is_alive(), 60)
        found = self._ready_line()
        assert found is not None, "\n".join(self.lines[-40:])
        return found[1]

    def _ready_line(self) -> re.Match[str] | None:
        matches = (re.match(r"ready after .* s: grpc ([^\s,]+)", line) for line in list(self.lines))
        return next((match for match in matches if match), None)

    def pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


@pytest.fixture
def served(tiny_llama_folder: Path) -> Iterator[Served]:  # noqa: F811
    flags = [
        "--port",
        "0",
        "--http-port",
        "0",
        "--kv-cache-memory",
        "16M",
        "--max-model-len",
        "512",
    ]
    fault = ["--decode-fault", "step_delay_s=0.02"]
    served = Served(str(tiny_llama_folder), *flags, *fault, "--served-model-name", "tiny")
    yield served
    served.process.kill()
    served.process.wait()


def test_serve_tells_its_phases_and_drains_on_sigterm(served: Served) -> None:
    address = served.wait_ready()
    pids = served.pids()
    assert len(pids) == 2 + 2 * 2
    text = "\n".join(served.lines)
    assert '"level": "INFO"' in text
    for phase in ("model", "redis", "workers and router"):
        assert re.search(rf"^{phase} ready after \d+\.\d s$", text, re.MULTILINE)
    assert re.search(r"^prefill: 1 x, KV for [\d,]+ tokens \(prefill-0 127", text, re.MULTILINE)
    assert re.search(r"^decode: 1 x, KV for [\d,]+ tokens \(decode-0 127", text, re.MULTILINE)

    pieces: list[str] = []

    def stop_once(text: str) -> None:
        if not pieces:
            served.process.send_signal(signal.SIGTERM)
        pieces.append(text)

    request = make_request(text="hello", max_tokens=40, temperature=0.0, ignore_eos=True)
    with open_sync_channel(address) as channel:
        found: Generation = generate_stream(channel, request, timeout_s=30, on_text=stop_once)
    assert len(found.token_ids) == 40
    assert served.process.wait(60) == 0
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)
    served.reader.join(30)
    assert served.lines[-1] == "stopped"


def test_a_second_signal_stops_at_once_and_clients_are_told(served: Served) -> None:
    address = served.wait_ready()
    pids = served.pids()
    pieces: list[str] = []

    def stop_twice(text: str) -> None:
        pieces.append(text)
        if len(pieces) in (2, 5):
            served.process.send_signal(signal.SIGTERM)

    request = make_request(text="hello", max_tokens=400, temperature=0.0, ignore_eos=True)
    with open_sync_channel(address) as channel, pytest.raises(NoWorker) as caught:
        generate_stream(channel, request, timeout_s=30, on_text=stop_twice)
    assert "this router stopped" in str(caught.value)
    assert 5 <= len(pieces) < 400
    assert served.process.wait(60) == 1
    served.reader.join(30)
    assert served.lines[-1] == "stopped at once; requests that still ran were cut"
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)


@pytest.mark.soak
def test_a_decode_worker_killed_just_before_the_drain_costs_no_stream(served: Served) -> None:
    address = served.wait_ready()
    pieces: list[str] = []
    with open_sync_channel(address) as channel:
        (pid,) = (w.face_pid for w in get_loads(channel) if w.worker_id == "decode-0")

        def kill_and_stop_once(text: str) -> None:
            pieces.append(text)
            if len(pieces) == 3:
                os.kill(pid, signal.SIGKILL)
                served.process.send_signal(signal.SIGTERM)

        request = make_request(text="hello", max_tokens=40, temperature=0.0, ignore_eos=True)
        found = generate_stream(channel, request, timeout_s=60, on_text=kill_and_stop_once)
    assert len(found.token_ids) == 40
    assert served.process.wait(60) == 0


def test_status_shows_a_worker_that_is_restarting(served: Served) -> None:
    address = served.wait_ready()

    def rows() -> dict[str, str]:
        argv = [sys.executable, "-m", "launcher.cli", "status", "--json", "--address", address]
        done = subprocess.run(
            argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        )
        return {one["worker_id"]: one["state"] for one in json.loads(done.stdout)["workers"]}

    with open_sync_channel(address) as channel:
        (pid,) = (w.face_pid for w in get_loads(channel) if w.worker_id == "decode-0")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rows() == {"prefill-0": "ready", "decode-0": "gone"}, 20)
    wait_until(lambda: rows() == {"prefill-0": "ready", "decode-0": "ready"}, 60)


@pytest.mark.soak
def test_log_level_silences_the_children(tiny_llama_folder: Path) -> None:  # noqa: F811
    flags = ("--port", "0", "--http-port", "0", "--kv-cache-memory", "16M", "--prefill", "0")
    quiet = Served(str(tiny_llama_folder), *flags, "--log-level", "warning")
    try:
        quiet.wait_ready()
    finally:
        quiet.process.kill()
        quiet.process.wait()
    assert not any('"level": "INFO"' in line for line in quiet.lines)


@pytest.mark.soak
def test_C10_killed_serve_leaves_no_process(served: Served) -> None:
    served.wait_ready()
    pids = served.pids()
    served.process.kill()
    served.process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)


def test_port_in_use_is_one_line_and_status_2(tiny_llama_folder: Path) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = Served(str(tiny_llama_folder), "--port", str(port), "--http-port", "0")
        assert second.process.wait(60) == 2
    second.reader.join(30)
    assert [line for line in second.lines if line.startswith("pdserve: ")] == second.lines[-1:]
    assert f"port {port} is already in use" in second.lines[-1]


@pytest.mark.timeout(240)
def test_demo_shows_equal_tokens_and_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "demo"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"same \d+ tokens, id for id, in [2-9] attempts", done.stdout)
    assert "prompt tokens computed again on decode workers: 0" in done.stdout
    assert re.search(r"stopped; none of \d+ processes is left", done.stdout)


def test_demo_of_a_missing_model_is_one_line_and_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "demo", "--model", "nope"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "pdserve: no model nope" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
