import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. It reads this once, when it is first imported:
    # that may be by any test module.
    os.environ["TRITON_INTERPRET"] = "1"

# Whatever ran before in this process: sums do not depend on the number of threads then, and two
# test processes do not fight for two cores.
torch.set_num_threads(1)

# The same examples each time, however slow the machine is at the moment.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

SOAK_TIMEOUT_S = 3600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders files, and gives full counts more time than the timeout that stops a hanging test."""
    _mix_files(items)
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))


def _mix_files(items: list[pytest.Item]) -> None:
    """Spreads the files that mostly wait for processes evenly among those that compute.

    Two that run at once then share two cores better, and start fewer processes at one time.
    """
    files = list(dict.fromkeys(item.path for item in items))
    place: dict[Path, float] = {}
    for is_waiting in (True, False):
        group = [path for path in files if ("integration" in path.parts) is is_waiting]
        place |= {path: index / len(group) for index, path in enumerate(group)}
    items.sort(key=lambda item: place[item.path])
