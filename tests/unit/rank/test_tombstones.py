import pytest

from pdserve.errors import StaleAttempt
from pdserve.rank.tombstones import KEEP_S, Tombstones
from pdserve.request import Request, RequestId, SamplingParams
from pdserve.timeline import ManualClock


def make_request(attempt: int) -> Request:
    return Request(
        request_id=RequestId("r"),
        token_ids=(1,),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        attempt=attempt,
    )


def test_C13_a_submit_after_its_cancel_is_refused() -> None:
    tombstones = Tombstones(ManualClock())
    tombstones.add(RequestId("r"), 2)
    for attempt in (1, 2):
        with pytest.raises(StaleAttempt):
            tombstones.check(make_request(attempt))
    tombstones.check(make_request(3))


def test_an_older_cancel_does_not_lower_the_fence() -> None:
    tombstones = Tombstones(ManualClock())
    tombstones.add(RequestId("r"), 5)
    tombstones.add(RequestId("r"), 1)
    with pytest.raises(StaleAttempt):
        tombstones.check(make_request(5))


def test_a_tombstone_goes_after_a_minute() -> None:
    clock = ManualClock()
    tombstones = Tombstones(clock)
    tombstones.add(RequestId("r"), 1)
    clock.advance(KEEP_S + 1)
    tombstones.expire()
    tombstones.check(make_request(1))
