import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def assemblies() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.unit.kernels.ranks_ptx"]
    found = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        check=False,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    kernels: dict[str, str] = json.loads(found.stdout)
    return kernels


@pytest.mark.parametrize("name", ["one row", "many rows", "two shots"])
def test_sums_poll_and_send_sixteen_bytes_at_a_time(assemblies: dict[str, str], name: str) -> None:
    code = assemblies[name]
    assert "ld.volatile.global.v4.b32" in code
    polls = [line for line in code.splitlines() if "ld.volatile" in line]
    assert all("v4" in line for line in polls)
    assert "st.global.v4.b32" in code


@pytest.mark.parametrize(
    "name", ["one row", "many rows", "two shots", "gather", "gather of ones", "choice", "join"]
)
def test_every_kernel_of_ranks_compiles_and_waits_for_the_one_before(
    assemblies: dict[str, str], name: str
) -> None:
    assert "griddepcontrol.wait" in assemblies[name]
