import os

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. It reads this once, when it is first imported:
    # that may be by any test module.
    os.environ["TRITON_INTERPRET"] = "1"

SOAK_TIMEOUT_S = 3600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Full counts take longer than the timeout that stops a test which hangs."""
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))
