"""The parent of everything of Ray's: when the launcher or the driver ends, it leaves no process.

Ray's own agents notice the end of a raylet late or, with the whole cluster gone, only after more
than a minute (ray 2.60). So this process adopts orphans and kills all that is below it at the end.
It asks the kernel for SIGTERM at the launcher's end instead of the SIGKILL that `spawn` asked for.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from types import FrameType

from pdserve.process import adopt_orphans, die_with_parent, list_descendants, spawn

_POLL_S = 0.05


def main() -> int:
    """Runs the driver with this process's arguments; returns its exit status."""
    is_told_to_end = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_told_to_end
        is_told_to_end = True

    signal.signal(signal.SIGTERM, on_signal)
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    channel_fd = int(sys.argv[sys.argv.index("--channel-fd") + 1])
    with tempfile.TemporaryDirectory(prefix="pdserve-ray-", ignore_cleanup_errors=True) as folder:
        argv = [sys.executable, "-m", "launcher.roles.ray_driver", "--temp-dir", folder]
        driver = spawn([*argv, *sys.argv[1:]], pass_fds=(channel_fd,), name="ray-driver")
        # Else the driver would never see the launcher's end of the channel close.
        os.close(channel_fd)
        try:
            while driver.poll() is None and not is_told_to_end and os.getppid() == parent:
                reap_orphans(driver.pid)
                time.sleep(_POLL_S)
        finally:
            kill_descendants()
    with suppress(subprocess.TimeoutExpired):
        return driver.wait(1.0)
    return 1


def reap_orphans(driver_pid: int) -> None:
    """Reaps adopted children that have ended; the driver's status is left to who waits for it."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == driver_pid:
                return
            os.waitpid(ended.si_pid, 0)


def kill_descendants() -> None:
    """Kills and reaps until nothing is left below this process."""
    while pids := list_descendants(os.getpid()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
