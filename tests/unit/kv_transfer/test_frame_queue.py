import threading

from kv_transfer.frame_queue import FrameQueue, LinkEnd
from kv_transfer.transport import OutgoingFrame
from pdserve.cache.kv_region import KvRegion
from pdserve.request import BlockId, ReservationId

REGION = KvRegion(
    block_ids=(BlockId(0),),
    offset=0,
    num_tokens=1,
    layers=range(1),
    heads=range(1),
    dtype="float32",
)


class Mark:
    def is_reached(self) -> bool:
        return False


def frame(index: int, reservation: bytes = b"r") -> OutgoingFrame:
    return OutgoingFrame(
        reservation_id=ReservationId(reservation), frame_index=index, num_bytes=8, payload=REGION
    )


def queue_of(*frames: OutgoingFrame) -> FrameQueue:
    queue = FrameQueue(3, lambda: None)
    assert all(queue.push(one) for one in frames)
    return queue


def take(queue: FrameQueue) -> OutgoingFrame:
    taken = queue.take(is_waiting=False)
    assert taken is not None
    return taken


def test_frames_keep_their_order_and_there_is_room_for_so_many() -> None:
    queue = queue_of(frame(0), frame(1), frame(2))
    assert not queue.has_room
    assert [take(queue).frame_index for _ in range(3)] == [0, 1, 2]
    assert queue.take(is_waiting=False) is None
    assert len(queue) == 3
    assert not queue.is_idle


def test_a_frame_that_is_through_is_forgotten() -> None:
    queue = queue_of(frame(0))
    taken = take(queue)
    assert queue.finish(taken)
    assert queue.is_idle


def test_the_end_names_what_waits_and_what_is_under_way_once() -> None:
    queue = queue_of(frame(0, b"a"), frame(1, b"b"))
    taken = take(queue)
    assert queue.close(LinkEnd(detail="first", is_orderly=False)) == {b"a", b"b"}
    assert queue.close(LinkEnd(detail="second", is_orderly=True)) is None
    assert queue.end == LinkEnd(detail="first", is_orderly=False)
    assert not queue.finish(taken)
    assert not queue.push(frame(2))
    assert queue.take(is_waiting=True) is None


def test_a_cancel_drops_what_waits_and_tells_of_what_is_read() -> None:
    queue = queue_of(frame(0, b"gone"), frame(1, b"gone"), frame(2, b"kept"))
    mark = Mark()
    queue.note_read(take(queue), mark)
    assert queue.cancel(ReservationId(b"gone")) == (mark,)
    assert queue.cancel(ReservationId(b"kept")) == ()
    assert len(queue) == 1


def test_a_cancel_waits_for_a_launch_that_has_begun() -> None:
    queue = queue_of(frame(0))
    taken, mark = take(queue), Mark()
    answers: list[tuple[object, ...]] = []
    asked = threading.Event()

    def cancel() -> None:
        asked.set()
        answers.append(queue.cancel(ReservationId(b"r")))

    thread = threading.Thread(target=cancel)
    thread.start()
    asked.wait()
    assert answers == []
    queue.note_read(taken, mark)
    thread.join()
    assert answers == [(mark,)]


def test_a_dead_link_still_tells_what_reads_the_blocks() -> None:
    queue = queue_of(frame(0))
    mark = Mark()
    queue.note_read(take(queue), mark)
    queue.close(LinkEnd(detail="dead", is_orderly=False))
    assert queue.cancel(ReservationId(b"r")) == (mark,)
