import pytest

SOAK_TIMEOUT_S = 3600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Full counts take longer than the timeout that stops a test which hangs."""
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))
