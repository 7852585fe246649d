"""The shell lines of Ray's pods, run with stand-ins for `ray` and `tini`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.manifests import Pod, pods

GENERATED = 'ray start  --address=head:6379  --block  --resources="{\\"pdserve_front\\":1}" '
"""As KubeRay generates it: with more than one space, and quotes that the shell must read."""
RAY_PODS = [pod for pod in pods() if pod.folder == "kuberay"]


def run_command(pod: Pod, folder: Path, ray_status: int = 0) -> tuple[int, list[str]]:
    """Runs a container's command; returns its status and what was called, in order."""
    calls = folder / "calls"
    for name, status in (("ray", ray_status), ("tini", 0)):
        script = folder / name
        script.write_text(f'#!/bin/bash\nprintf "%s|" {name} "$@" >> {calls}\nexit {status}\n')
        script.chmod(0o755)
    container = pod.container
    argv = [*container["command"], *container["args"]]
    done = subprocess.run(
        argv,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": GENERATED},
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, calls.read_text().strip("|").split("|")


pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.mark.parametrize(
    "pod", [p for p in RAY_PODS if p.component != "router"], ids=lambda pod: pod.component
)
def test_a_pod_of_ray_becomes_ray_start_and_ends_with_its_status(pod: Pod, tmp_path: Path) -> None:
    status, calls = run_command(pod, tmp_path, ray_status=3)
    assert status == 3
    assert calls == [
        *("ray", "start", "--address=head:6379", "--block"),
        '--resources={"pdserve_front":1}',
    ]


def front() -> Pod:
    (found,) = [pod for pod in RAY_PODS if pod.component == "router"]
    return found


def test_the_front_starts_ray_beside_itself_and_becomes_the_launcher(tmp_path: Path) -> None:
    status, calls = run_command(front(), tmp_path)
    assert status == 0
    ray, launcher = calls[: calls.index("tini")], calls[calls.index("tini") :]
    assert ray == [
        *("ray", "start", "--address=head:6379"),
        '--resources={"pdserve_front":1}',
    ]
    assert launcher[:5] == ["tini", "--", "pdserve", "serve", "/models/model"]
    assert launcher[5:] == list(front().flags)


def test_the_front_does_not_start_without_ray(tmp_path: Path) -> None:
    status, calls = run_command(front(), tmp_path, ray_status=1)
    assert status == 1
    assert "tini" not in calls
