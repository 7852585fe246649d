"""The end of a face's process."""

import subprocess
import sys

import pytest

import decode_worker.server
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import WorkerConfig
from pdserve.request import Role

_HANGS = """
import asyncio
from pdserve.face.main import bound_close
bound_close(0.3)

async def hang():
    await asyncio.Event().wait()
asyncio.run(hang())
"""


def test_a_face_whose_close_hangs_ends_and_says_where_it_stood() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1
    assert "Timeout (0:00:00.3" in done.stderr
    assert "run_forever" in done.stderr


def test_program_of_one_role_refuses_to_flip(capfd: pytest.CaptureFixture[str]) -> None:
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        engine=EngineConfig(model="m"),
        redis_url="redis://127.0.0.1:1",
        can_flip=True,
    )
    assert decode_worker.server.run(config) == 2
    assert "error: --can-flip must be off: this program has one role" in capfd.readouterr().err
