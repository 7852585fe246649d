import pytest

from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.prefill_side import PrefillHandoff
from pdserve.timeline import ManualClock
from tests.unit.kv_transfer.sides import FakeReserver, make_decode, make_prefill


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def reserver() -> FakeReserver:
    return FakeReserver()


@pytest.fixture
def decode(clock: ManualClock, reserver: FakeReserver) -> DecodeHandoffs:
    return make_decode(clock, reserver)


@pytest.fixture
def handoff(clock: ManualClock) -> PrefillHandoff:
    return make_prefill(clock)
