"""deploy/image/drain_pod.py, which runs in a pod before it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.cluster import wait_until
from tests.support.manifests import DEPLOY

SCRIPT = DEPLOY / "image" / "drain_pod.py"
STAND_IN = """
import pathlib, signal, sys, time
folder, drain_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def note(number, frame):
    with (folder / "signals").open("a") as file:
        file.write(f"{number}\\n")
signal.signal(signal.SIGTERM, note)
(folder / "ready").touch()
while not (folder / "signals").exists():
    time.sleep(0.01)
time.sleep(drain_s)
"""


@pytest.fixture(scope="module")
def drain_pod() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drain_pod", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("argv", "is_face"),
    [
        (["python", "-m", "launcher.roles.decode_worker", "--port", "0"], True),
        (["python", "-m", "launcher.roles.prefill_worker"], True),
        (["python", "-m", "launcher.roles.stage"], True),
        (["python", "-m", "decode_worker.rank"], False),
        (["python", "-m", "launcher.roles.router"], False),
        (["grep", "launcher.roles.decode_worker"], False),
        ([""], False),
        ([], False),
    ],
)
def test_only_replicas_are_told_to_drain_not_their_ranks(
    drain_pod: ModuleType, argv: list[str], is_face: bool
) -> None:
    assert drain_pod.is_face(argv) is is_face


def test_the_raylet_is_known_by_its_program(drain_pod: ModuleType) -> None:
    assert drain_pod.is_raylet(["/x/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=a"])
    assert not drain_pod.is_raylet(["python", "raylet"])
    assert not drain_pod.is_raylet([])


def test_the_modules_it_looks_for_exist(drain_pod: ModuleType) -> None:
    assert all(importlib.util.find_spec(name) is not None for name in drain_pod.FACES)


def test_a_process_that_ends_during_the_look_is_passed_over(
    drain_pod: ModuleType, tmp_path: Path
) -> None:
    for name in ("7", "8", "self"):
        (tmp_path / name).mkdir()
    (tmp_path / "8" / "cmdline").write_bytes(b"python\0-m\0launcher.roles.stage\0")
    assert drain_pod.find_processes(tmp_path, drain_pod.is_face) == [8]


class Pod:
    """Processes that look like a pod's, and a /proc that shows them alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, cmdline: list[str], drain_s: float) -> None:
        own = self.folder / name
        own.mkdir()
        process = subprocess.Popen([sys.executable, "-c", STAND_IN, str(own), str(drain_s)])
        self.processes[name] = process
        wait_until(lambda: (own / "ready").exists(), 20.0)
        entry = self.proc / str(process.pid)
        entry.mkdir()
        (entry / "cmdline").write_bytes("\0".join(cmdline).encode())

    def reap(self) -> None:
        """What a /proc does by itself: forgets who has ended."""
        for process in self.processes.values():
            if process.poll() is not None:
                (self.proc / str(process.pid) / "cmdline").unlink(missing_ok=True)

    def signals(self, name: str) -> list[int]:
        path = self.folder / name / "signals"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def drain(self, timeout_s: float) -> int:
        argv = [sys.executable, str(SCRIPT), "--timeout-s", str(timeout_s)]
        # Without Ray's program on the path nobody is asked.
        script = subprocess.Popen([*argv, "--proc", str(self.proc)], env={"PATH": "/nowhere"})

        def has_ended() -> bool:
            self.reap()
            return script.poll() is not None

        wait_until(has_ended, 30.0)
        return script.wait()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    for process in pod.processes.values():
        process.kill()
        process.wait()


FACE = ["python", "-m", "launcher.roles.decode_worker"]
RAYLET = ["/opt/ray/raylet"]


def test_replicas_finish_and_then_the_raylet_is_told_to_end(pod: Pod) -> None:
    pod.start("face", FACE, drain_s=0.5)
    pod.start("rank", ["python", "-m", "decode_worker.rank"], drain_s=0.0)
    pod.start("raylet", RAYLET, drain_s=0.0)
    assert pod.drain(timeout_s=20.0) == 0
    assert pod.processes["face"].wait(30) == 0
    wait_until(lambda: pod.signals("raylet") == [signal.SIGTERM], 30.0)
    assert pod.signals("face") == [signal.SIGTERM], "a second one would cut what still runs"
    assert pod.signals("rank") == []


def test_a_replica_that_does_not_finish_in_time_is_named_by_the_status(pod: Pod) -> None:
    pod.start("face", FACE, drain_s=60.0)
    assert pod.drain(timeout_s=0.5) == 1
    assert pod.processes["face"].poll() is None


def test_a_pod_without_replicas_ends_at_once(pod: Pod) -> None:
    assert pod.drain(timeout_s=20.0) == 0


def test_the_script_needs_nothing_but_python() -> None:
    assert os.access(SCRIPT, os.X_OK)
    argv = [sys.executable, "-I", "-S", str(SCRIPT), "--help"]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("status", "complaint"), [(0, ""), (3, "ray drain-node failed: no raylet")]
)
def test_ray_is_asked_to_place_nothing_here_and_its_refusal_stops_nothing(
    status: int,
    complaint: str,
    drain_pod: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho no raylet >&2\nexit {status}\n')
    ray.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    drain_pod.leave_ray(30.0)
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
    assert asked.endswith("--deadline-remaining-seconds 30\n")
    assert complaint in capsys.readouterr().err
