from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.http_client import add_pair, http_client
from tests.support.router_harness import Cluster


@pytest.fixture
async def pair(cluster: Cluster) -> Cluster:
    """A front with one prefill and one decode worker."""
    await add_pair(cluster)
    return cluster


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the pair."""
    async with http_client(pair) as opened:
        yield opened
