#!/usr/bin/env python3
"""What a pod of a Ray worker group does before it ends (preStop): it lets its replicas finish.

Kubernetes would stop the raylet, and with it every replica in the pod, in mid-stream. So first Ray
places nothing here any more, then each face gets SIGTERM, which makes it drain, and at last the
raylet ends, before the launcher's next attempt could be placed here.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

FACES = ("launcher.roles.prefill_worker", "launcher.roles.decode_worker", "launcher.roles.stage")
"""Modules that `python -m` runs; each drains on SIGTERM."""
_POLL_S = 0.2
_RAY_CALL_TIMEOUT_S = 15.0


def main() -> int:
    """Drains this pod; returns 1 if replicas are left at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=float, default=75.0, help="for replicas to finish")
    parser.add_argument("--proc", type=Path, default=Path("/proc"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    leave_ray(options.timeout_s)
    left = drain_faces(options.proc, options.timeout_s)
    signal_all(find_processes(options.proc, is_raylet), signal.SIGTERM)
    if left:
        sys.stderr.write(f"still running after {options.timeout_s:g} s: {left}\n")
    return 1 if left else 0


def leave_ray(timeout_s: float) -> None:
    """Asks Ray to place nothing here; without Ray, or against its will, replicas drain as well."""
    ray = shutil.which("ray")
    if ray is None:
        return
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends"]
    deadline = ["--deadline-remaining-seconds", str(int(timeout_s))]
    try:
        answer = subprocess.run(
            [ray, "drain-node", *why, *deadline],
            timeout=_RAY_CALL_TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sys.stderr.write("ray drain-node does not answer\n")
        return
    if answer.returncode != 0:
        sys.stderr.write(f"ray drain-node failed: {answer.stderr.strip()[-500:]}\n")


def drain_faces(proc: Path, timeout_s: float) -> list[int]:
    """Sends one SIGTERM to each face and waits; returns those that are still there."""
    deadline_s = time.monotonic() + timeout_s
    told: set[int] = set()
    while faces := find_processes(proc, is_face):
        # A second SIGTERM would cut what still runs.
        signal_all([pid for pid in faces if pid not in told], signal.SIGTERM)
        told.update(faces)
        if time.monotonic() > deadline_s:
            return faces
        time.sleep(_POLL_S)
    return []


def is_face(argv: Sequence[str]) -> bool:
    """Whether this is a replica's own process: its ranks are its to end."""
    return any(flag == "-m" and name in FACES for flag, name in pairwise(argv))


def is_raylet(argv: Sequence[str]) -> bool:
    """Whether this is Ray's own process of this node."""
    return bool(argv) and Path(argv[0]).name == "raylet"


def find_processes(proc: Path, is_wanted: Callable[[Sequence[str]], bool]) -> list[int]:
    """Returns the ids of living processes whose command line is wanted, by what /proc says."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        # A process may end between the listing and the look; a zombie's command line is empty.
        with suppress(OSError):
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if is_wanted(argv):
                found.append(int(folder.name))
    return sorted(found)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Sends a signal to each that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
