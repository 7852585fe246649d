"""One process at a time sets itself up on a GPU that several share.

What a process takes is seen in what is free on the GPU, and how long its kernels take in their
times: both mean nothing while another one allocates and measures.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_S = 0.05


@contextmanager
def taking_turn(gpu: str, timeout_s: float, folder: Path | None = None) -> Iterator[bool]:
    """Holds a GPU's turn among the processes of this machine; the end of a process gives it back.

    Args:
        gpu: its UUID.
        timeout_s: how long to wait for others; then it goes on without, and says so.
        folder: where the turns are; None: the machine's folder for temporary files.

    Yields:
        Whether it has the turn.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"pdserve-{os.getuid()}-{gpu}.turn"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.warning("no turns are taken on this GPU", extra={"gpu": gpu, "detail": str(error)})
        yield False
        return
    try:
        has_turn = _wait(descriptor, time.monotonic() + timeout_s)
        if not has_turn:
            logger.warning("others take long to start on this GPU", extra={"gpu": gpu})
        yield has_turn
    finally:
        os.close(descriptor)


def _wait(descriptor: int, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        else:
            return True
