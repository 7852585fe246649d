from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.router_harness import Cluster, run_cluster
from tests.support.text_models import make_text_model


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(text_folder: Path) -> AsyncIterator[Cluster]:
    """A front; the test adds workers."""
    async with run_cluster(text_folder) as running:
        yield running
