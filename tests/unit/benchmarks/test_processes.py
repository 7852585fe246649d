"""Processes that benchmarks put on cores of their own."""

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from benchmarks.processes import spread


def test_thread_that_ends_while_threads_are_listed_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = os.sched_getaffinity(0)
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    path = Path(f"/proc/self/task/{thread.native_id}")
    really_set = os.sched_setaffinity
    told: list[int] = []

    def end_thread_and_set(task: int, wanted: Collection[int]) -> None:
        if task == thread.native_id:
            ends.set()
            thread.join()
            deadline_s = time.monotonic() + 20
            while path.exists():
                assert time.monotonic() < deadline_s
        told.append(task)
        really_set(task, wanted)

    monkeypatch.setattr(os, "sched_setaffinity", end_thread_and_set)
    with spread(os.getpid(), os.getpid()):
        assert os.sched_getaffinity(0) == {max(cores)}
    assert thread.native_id in told
    assert os.sched_getaffinity(0) == cores


def test_process_that_has_ended_is_told() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    with pytest.raises(OSError, match=str(pid)), spread(pid, os.getpid()):
        raise AssertionError
