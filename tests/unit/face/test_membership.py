import pytest

from pdserve.face.membership import Membership
from pdserve.registry.memory import MemoryRegistry
from pdserve.timeline import ManualClock
from tests.support.records import make_record

RECORD = make_record()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> MemoryRegistry:
    return MemoryRegistry(clock)


def make_membership(registry: MemoryRegistry) -> Membership:
    return Membership(registry, RECORD, heartbeat_s=0.5, lease_s=3.0)


async def test_a_renewed_record_lives_for_another_lease(
    registry: MemoryRegistry, clock: ManualClock
) -> None:
    membership = make_membership(registry)
    await membership.renew()
    clock.advance(2.0)
    await membership.renew()
    clock.advance(2.0)
    assert await registry.list_workers() == (RECORD,)
    clock.advance(2.0)
    assert await registry.list_workers() == ()


async def test_C9_no_renewal_brings_back_a_worker_that_has_left(registry: MemoryRegistry) -> None:
    membership = make_membership(registry)
    await membership.renew()
    await membership.leave()
    assert await registry.list_workers() == ()
    await membership.renew()
    assert await registry.list_workers() == ()
