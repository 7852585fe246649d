"""`pdserve flip` against a running `pdserve serve`, as a user runs both."""

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import pytest

from launcher.cli import run_command
from launcher.client import generate_stream, get_loads, open_sync_channel
from tests.integration.test_serve import Served
from tests.support.cluster import make_request, wait_until
from tests.support.models import tiny_llama_folder  # noqa: F401

FLAGS = ["--port", "0", "--http-port", "0", "--kv-cache-memory", "16M", "--max-model-len", "512"]


class Watch:
    """Collects the states that the router shows of a worker."""

    def __init__(self, channel: grpc.Channel, worker_id: str) -> None:
        self.states: set[str] = set()
        self._channel = channel
        self._worker_id = worker_id
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.02):
            found = {one.worker_id: one.state for one in get_loads(self._channel)}
            self.states.add(found.get(self._worker_id, "not shown"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of this test's own: no other launcher is found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def served(folder: Path, tiny_llama_folder: Path) -> Iterator[Served]:  # noqa: F811
    served = Served(str(tiny_llama_folder), *FLAGS, "--prefill", "2", "--flips")
    yield served
    served.process.kill()
    served.process.wait()


def test_flip_moves_a_replica_of_fixed_pools_and_says_what_cannot_be(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    address = served.wait_ready()
    wait_until(lambda: bool(run_command(["scale", "--status"]) == 0), 10)
    capsys.readouterr()
    for argv, text in (
        (["decode-7", "prefill"], "there is no replica named 'decode-7'"),
        (["decode-0", "router"], "ROLE must be one of prefill, decode, got 'router'"),
        (["decode-0", "decode"], "decode-0 is a decode replica already"),
        (["decode-0", "prefill"], "decode-0 is the last of the decode pool"),
    ):
        assert run_command(["flip", *argv]) == 2
        assert capsys.readouterr().err == f"pdserve: {text}\n"

    with open_sync_channel(address) as channel:
        pids = {one.worker_id: one.face_pid for one in get_loads(channel)}
        with Watch(channel, "prefill-1") as watch:
            assert run_command(["flip", "prefill-1", "decode", "--wait"]) == 0
        ordered, served_there = capsys.readouterr().out.splitlines()
        assert ordered == "prefill-1 drains to become a decode replica"
        assert re.fullmatch(r"prefill-1 serves as a decode replica after \d+\.\d s", served_there)
        # It was never missing, nor called dead.
        assert not watch.states & {"not shown", "gone", "lost", "stopped"}, watch.states
        found = {one.worker_id: (one.role, one.state) for one in get_loads(channel)}
        assert found["prefill-1"] == ("decode", "ready")
        assert {one.worker_id: one.face_pid for one in get_loads(channel)} == pids
        request = make_request(text="hello", max_tokens=8, temperature=0.0, ignore_eos=True)
        assert len(generate_stream(channel, request, timeout_s=30).token_ids) == 8
    assert run_command(["scale", "--status"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"prefill\s+1\.\.1", table)
    assert re.search(r"decode\s+2\.\.2", table)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(30) == 0


def test_flip_without_a_launcher_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["flip", "prefill-0", "decode"]) == 2
    assert capsys.readouterr().err == "pdserve: no pdserve serve runs here\n"
    assert run_command(["flip", "prefill-0", "decode", "--cluster", "c"]) == 2
    assert "no launcher of a cluster named c runs here" in capsys.readouterr().err
