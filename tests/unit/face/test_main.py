"""The end of a face's process."""

import subprocess
import sys

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
