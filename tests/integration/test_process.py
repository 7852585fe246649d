import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from pdserve.process import is_running, list_descendants, spawn

PYTHON = sys.executable

PARENT = """
import sys, time
from pdserve.process import is_running, spawn
child = spawn([sys.executable, "-c", "import time; time.sleep(60)"], name="grandchild")
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_gone(pid: int, timeout_s: float = 30.0) -> bool:
    """Waits for a process that is no child of ours to end (a zombie has ended)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_child_reports_its_exit_status() -> None:
    child = spawn([PYTHON, "-c", "raise SystemExit(7)"], name="seven")
    assert child.wait(60) == 7
    assert child.poll() == 7
    assert child.returncode == 7


def test_child_output_comes_through_the_pipe_with_stderr() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    child = spawn([PYTHON, "-c", code], stdout=subprocess.PIPE, name="talker")
    assert child.stdout is not None
    with child.stdout as pipe:
        lines = set(pipe.read().split())
    assert lines == {b"out", b"err"}
    assert child.wait(60) == 0


def test_child_leads_its_own_session() -> None:
    code = "import os; raise SystemExit(0 if os.getsid(0) == os.getpid() == os.getpgrp() else 1)"
    assert spawn([PYTHON, "-c", code], name="leader").wait(60) == 0


def test_child_inherits_a_passed_socket_and_extra_variables() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "import os, socket, sys;"
        "socket.socket(fileno=int(sys.argv[1])).send(os.environ['EXTRA'].encode())"
    )
    with ours, theirs:
        child = spawn(
            [PYTHON, "-c", code, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={"EXTRA": "hello"},
            name="heir",
        )
        ours.settimeout(10)
        assert ours.recv(100) == b"hello"
    assert child.wait(60) == 0


def test_child_dies_with_a_killed_parent() -> None:
    parent = subprocess.Popen([PYTHON, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as pipe:
        grandchild = int(pipe.readline())
        # Past the wrapper, so that the signal has survived the exec.
        deadline = time.monotonic() + 30
        while "sleep" not in " ".join(psutil.Process(grandchild).cmdline()[-1:]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()
        parent.wait()
    assert wait_gone(grandchild)


def test_kill_takes_the_whole_group_of_a_stopped_child() -> None:
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    child = spawn([PYTHON, "-c", code], stdout=subprocess.PIPE, name="group")
    assert child.stdout is not None
    with child.stdout as pipe:
        grandchild = int(pipe.readline())
    child.send_signal(signal.SIGSTOP)
    child.kill()
    assert child.wait(30) == -signal.SIGKILL
    assert wait_gone(grandchild)


def test_kill_after_the_end_does_nothing() -> None:
    child = spawn([PYTHON, "-c", ""], name="short")
    assert child.wait(60) == 0
    child.kill()
    child.terminate()
    assert child.wait(0) == 0


def test_wait_raises_when_time_is_up() -> None:
    child = spawn([PYTHON, "-c", "import time; time.sleep(60)"], name="sleeper")
    try:
        with pytest.raises(TimeoutError, match="sleeper still runs"):
            child.wait(0.05)
    finally:
        child.kill()
        child.wait(5)


def test_stop_kills_a_child_that_ignores_sigterm() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('up', flush=True); time.sleep(60)"
    )
    child = spawn([PYTHON, "-c", code], stdout=subprocess.PIPE, name="stubborn")
    assert child.stdout is not None
    with child.stdout as pipe:
        assert pipe.readline() == b"up\n"
        assert child.stop(grace_s=0.2) == -signal.SIGKILL


def test_missing_program_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no program /nowhere/at/all for ghost"):
        spawn(["/nowhere/at/all"], name="ghost")


def test_running_child_is_running_and_a_zombie_is_not() -> None:
    child = spawn([PYTHON, "-c", "import time; time.sleep(60)"], name="sleeper")
    assert is_running(child.pid)
    child.kill()
    deadline = time.monotonic() + 30
    while is_running(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    child.wait(5)
    assert not is_running(child.pid)


ADOPTED = """
import os, subprocess, sys, time
from pdserve.process import adopt_orphans, list_descendants
adopt_orphans()
middle = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
found = subprocess.run([sys.executable, "-c", middle], capture_output=True, check=True)
orphan = int(found.stdout)
print(orphan, list_descendants(os.getpid()) == [orphan], flush=True)
os.kill(orphan, 9)
"""


def test_orphans_are_adopted_and_listed_among_the_descendants() -> None:
    found = subprocess.run(
        [PYTHON, "-c", ADOPTED], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split()[1] == "True"


def test_descendants_of_a_process_that_is_gone_are_none() -> None:
    child = spawn([PYTHON, "-c", ""], name="brief")
    child.wait(60)
    assert list_descendants(child.pid) == []


FORKED = """
import os, signal, sys, time
from pdserve.process import die_with_parent
child = os.fork()
if child == 0:
    die_with_parent(signal.SIGTERM)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_process_that_was_not_spawned_may_die_with_its_parent_too() -> None:
    parent = subprocess.Popen([PYTHON, "-c", FORKED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert wait_gone(pid)
    parent.stdout.close()
