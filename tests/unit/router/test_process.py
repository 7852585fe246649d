"""The router as a process: its ready line, its signals, its exit codes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = (
    "import sys; from pdserve.config.router import RouterConfig; from router.server import run; "
    "sys.exit(run(RouterConfig(model=sys.argv[1], redis_url='redis://127.0.0.1:1/0', "
    "port=int(sys.argv[2]), http_port=0, drain_timeout_s=5.0)))"
)


def _start(folder: Path, port: int = 0) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_C15_a_signal_drains_and_exits_with_0(text_folder, number):
    process = _start(text_folder)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("router ready: grpc 127.0.0.1:")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_is_one_line_and_exit_2(text_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = _start(text_folder, taken.getsockname()[1])
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is already in use" in errors
    assert "Traceback" not in errors


def test_a_missing_model_is_one_line_and_exit_2(tmp_path):
    process = _start(tmp_path / "nothing")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("error: ")
    assert len(errors.splitlines()) == 1


def test_the_router_imports_no_torch():
    program = "import sys, router.server; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0
