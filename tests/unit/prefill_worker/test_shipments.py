from pdserve.request import ReservationId
from pdserve.timeline import ManualClock
from prefill_worker.shipments import Shipments

FIRST, SECOND = ReservationId(b"1" * 16), ReservationId(b"2" * 16)


def test_links_are_busy_until_every_frame_is_through() -> None:
    clock = ManualClock()
    shipments = Shipments(clock)
    assert shipments.since_s is None
    clock.advance(1.0)
    shipments.add(FIRST, 0)
    clock.advance(1.0)
    shipments.add(FIRST, 1)
    assert shipments.since_s == 2.0
    shipments.sent(FIRST, 0)
    assert shipments.since_s == 2.0
    shipments.sent(FIRST, 1)
    assert shipments.since_s is None


def test_frames_that_nobody_wants_keep_no_link_busy() -> None:
    shipments = Shipments(ManualClock())
    shipments.add(FIRST, 0)
    shipments.add(SECOND, 0)
    shipments.drop(FIRST)
    assert shipments.since_s is not None
    # Announced before it was dropped: its end comes still.
    shipments.sent(FIRST, 0)
    shipments.drop(SECOND)
    shipments.drop(SECOND)
    assert shipments.since_s is None


def test_frames_sent_ahead_keep_links_busy_from_the_end_of_their_step_on() -> None:
    clock = ManualClock()
    shipments = Shipments(clock)
    shipments.begin_step(4)
    shipments.begin_step(5)
    shipments.add(FIRST, 0, 4)
    shipments.add(FIRST, 1, 4)
    shipments.add(SECOND, 0, 5)
    shipments.sent(FIRST, 0)
    assert shipments.since_s is None
    clock.advance(3.0)
    shipments.end_step()
    assert shipments.since_s == 3.0
    shipments.sent(FIRST, 1)
    assert shipments.since_s is None, "what waits for the other step has nothing to send"
    shipments.drop(SECOND)
    shipments.end_step()
    assert shipments.since_s is None


def test_a_frame_whose_step_has_ended_meanwhile_is_sent_from_now_on() -> None:
    clock = ManualClock()
    shipments = Shipments(clock)
    shipments.begin_step(4)
    shipments.end_step()
    clock.advance(1.0)
    shipments.add(FIRST, 0, 4)
    assert shipments.since_s == 1.0
