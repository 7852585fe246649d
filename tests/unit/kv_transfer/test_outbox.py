from dataclasses import replace

from kv_transfer.outbox import FrameOutbox
from kv_transfer.prefill_actions import PushFrame
from pdserve.request import Incarnation, ReservationId
from tests.unit.kv_transfer.sides import ENDPOINT, MANIFEST, target


def push(peer: int, index: int, reservation: bytes = b"r") -> PushFrame:
    return PushFrame(
        target=replace(target(), incarnation=Incarnation(peer)),
        endpoint=ENDPOINT,
        reservation_id=ReservationId(reservation),
        frame=MANIFEST.frames[index],
    )


def taken(outbox: FrameOutbox, *full: int) -> list[tuple[int, int]]:
    order = []
    while (action := outbox.take(lambda ends: ends.peer not in full)) is not None:
        order.append((int(action.target.incarnation), action.frame.index))
    return order


def test_frames_of_one_peer_keep_their_order_and_peers_take_turns() -> None:
    outbox = FrameOutbox()
    for action in (push(1, 0), push(1, 1), push(1, 2), push(2, 0)):
        outbox.add(action)
    assert taken(outbox) == [(1, 0), (2, 0), (1, 1), (1, 2)]
    assert len(outbox) == 0


def test_a_full_link_holds_up_only_its_own_frames() -> None:
    outbox = FrameOutbox()
    outbox.add(push(1, 0))
    outbox.add(push(2, 0))
    assert taken(outbox, 1) == [(2, 0)]
    assert len(outbox) == 1
    assert taken(outbox) == [(1, 0)]


def test_dropping_a_reservation_leaves_the_others() -> None:
    outbox = FrameOutbox()
    for action in (push(1, 0, b"a"), push(1, 0, b"b"), push(2, 0, b"a")):
        outbox.add(action)
    outbox.drop(ReservationId(b"a"))
    action = outbox.take(lambda peer: True)
    assert action is not None
    assert action.reservation_id == b"b"
    assert len(outbox) == 0


def test_frames_of_a_step_in_flight_go_in_the_order_in_which_it_computes_them() -> None:
    first, last = (replace(MANIFEST.frames[0], first_layer=layer, index=layer) for layer in (0, 8))
    outbox = FrameOutbox()
    for step, reservation in ((4, b"a"), (4, b"b"), (3, b"c")):
        for frame in (first, last):
            action = replace(push(1, 0, reservation), frame=frame, after_step=step)
            outbox.add(action)
    outbox.add(push(1, 1, b"d"))
    order = []
    while (taken := outbox.take(lambda ends: True)) is not None:
        order.append((taken.reservation_id, taken.frame.first_layer))
    assert order == [
        (b"d", 0),
        *((b"c", layer) for layer in (0, 8)),
        *((name, layer) for layer in (0, 8) for name in (b"a", b"b")),
    ]
