"""Child processes: started by exec, never by fork after grpc or torch, and dead with their parent.

Every child is led by a wrapper of a few lines that sets its parent-death signal and then execs the
real program, so that no Python code runs between fork and exec in a process full of threads.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# PDEATHSIG (prctl 1) survives exec. The parent may die before prctl was called: then getppid()
# has changed already and nobody would ever send the signal.
_WRAPPER = """
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed: errno %d" % ctypes.get_errno())
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[3:])
"""


class ChildProcess:
    """A running child, leader of its own session and process group.

    Owned by whoever spawned it: that one must `wait` for it in the end.
    """

    def __init__(self, popen: subprocess.Popen[bytes], name: str) -> None:
        """Wraps a started process; `spawn` is the way to make one."""
        self._popen = popen
        self.name = name

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._popen.pid

    @property
    def stdout(self) -> IO[bytes] | None:
        """The pipe with the child's output, if `spawn` was asked for one."""
        return self._popen.stdout

    @property
    def returncode(self) -> int | None:
        """Exit status as of the last poll or wait, negative for a signal; None while it runs."""
        return self._popen.returncode

    def poll(self) -> int | None:
        """Returns the exit status, or None while the child runs."""
        return self._popen.poll()

    def send_signal(self, signal_number: int) -> None:
        """Sends a signal to the child alone; does nothing once it has ended."""
        self._popen.send_signal(signal_number)

    def terminate(self) -> None:
        """Asks the child alone to end (SIGTERM): it ends its own children in its own order."""
        self._popen.terminate()

    def kill(self) -> None:
        """Kills the child's whole process group; children in sessions of their own die with it."""
        if self._popen.poll() is not None:
            return
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            # The wrapper has not become a group leader yet, or the group has just ended.
            self._popen.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit status.

        Raises:
            TimeoutError: the child still runs after `timeout_s`.
        """
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout_s} s") from None

    def stop(self, grace_s: float) -> int:
        """Terminates the child, kills it after `grace_s`, and returns its exit status."""
        self.terminate()
        try:
            return self.wait(grace_s)
        except TimeoutError:
            self.kill()
            return self.wait()


def spawn(
    argv: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    name: str,
) -> ChildProcess:
    """Starts a program in a new session; it is killed when the calling thread ends.

    The kernel ties the parent-death signal to the thread that spawned, not to its process: call
    from the main thread, or from one that outlives the child.

    Args:
        argv: program and arguments; the program is looked up on PATH.
        pass_fds: descriptors the child inherits under the same numbers.
        env: variables added to the inherited environment.
        stdout: descriptor or `subprocess.PIPE` for stdout and stderr; None inherits both.
        name: for messages.

    Raises:
        FileNotFoundError: there is no such program.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(f"no program {argv[0]} for {name}")
    # -I -S: neither site packages nor PYTHONPATH slow the wrapper down (20 ms) or change it.
    wrapper = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), program]
    popen = subprocess.Popen(
        [*wrapper, *argv],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=None if stdout is None else subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        env=None if env is None else {**os.environ, **env},
        start_new_session=True,
    )
    return ChildProcess(popen, name)


def is_running(pid: int) -> bool:
    """Says whether a process lives; one that ended but was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The state follows the command in parentheses, which may itself hold any of these.
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Asks the kernel for a signal at the end of the thread that started this process.

    For processes that `spawn` did not start, or that want another signal than SIGKILL.

    Raises:
        OSError: the kernel refuses.
    """
    _set_process_option(1, int(signal_number))


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose own parent ends.

    Raises:
        OSError: the kernel refuses.
    """
    _set_process_option(36, 1)


def _set_process_option(option: int, value: int) -> None:
    """Calls prctl(2).

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")


def list_descendants(pid: int) -> list[int]:
    """Returns all processes below one, zombies left out, parents before their children."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in ("Z", "X"):
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
