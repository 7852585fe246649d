import torch

from kv_transfer.landing_ring import LandingRing


class Mark:
    def __init__(self) -> None:
        self.is_done = False

    def is_reached(self) -> bool:
        return self.is_done


def make_ring() -> LandingRing:
    return LandingRing(torch.zeros(3 * 16, dtype=torch.uint8), 3, lambda: None)


def test_slots_are_taken_landed_and_freed() -> None:
    ring = make_ring()
    assert [ring.take() for _ in range(4)] == [0, 1, 2, None]
    ring.land(1)
    assert not ring.is_quiet
    ring.slot(1, 4).fill_(7)
    assert ring.payload(1, 4).tolist() == [7] * 4
    ring.release(1, None)
    assert ring.is_quiet
    assert ring.take() == 1


def test_a_slot_that_the_device_still_reads_is_not_free() -> None:
    ring, mark = make_ring(), Mark()
    for _ in range(3):
        ring.take()
    ring.land(0)
    ring.release(0, mark)
    assert ring.is_draining
    assert not ring.is_quiet
    assert ring.take() is None
    mark.is_done = True
    assert ring.reclaim() == 1
    assert ring.is_quiet
    assert ring.take() == 0


def test_waiting_for_a_slot_ends_with_the_time_or_the_link() -> None:
    ring = make_ring()
    for _ in range(3):
        ring.take()
    assert ring.wait_and_take(0.0, lambda: False) is None
    assert ring.wait_and_take(9.0, lambda: True) is None
    ring.land(2)
    ring.release(2, None)
    assert ring.wait_and_take(9.0, lambda: False) == 2
