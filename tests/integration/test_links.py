"""Links between real processes, which are killed and stopped at the worst moments."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEvent
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.receiver import LinkListener
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import SenderIdentity
from kv_transfer.transport import LinkPeer, OutgoingFrame
from pdserve.request import Incarnation, ReservationId, WorkerId
from tests.support.link_peer import CONFIG, frame_payload

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LARGE = 64 * MIB
"""Takes long enough to be killed in."""


class Child:
    """A `tests.support.link_peer` process."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.link_peer", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout

    def say(self, *words: object) -> None:
        self._input.write(" ".join(map(str, words)) + "\n")
        self._input.flush()

    def hear(self) -> list[str]:
        return self._output.readline().split()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        sent_at_s = time.monotonic()
        # A stopped process may go on for a moment: its threads stop one by one.
        while number == signal.SIGSTOP and not is_stopped(self.process.pid):
            assert time.monotonic() < sent_at_s + 10
            time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._input.close()
        self._output.close()


def is_stopped(pid: int) -> bool:
    """Says whether every thread of a process stands still."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


class Inbox:
    """The test's own engine inbox."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.post: Callable[[LinkEvent], None] = self._events.put

    def get(self, timeout_s: float = 30.0) -> LinkEvent:
        return self._events.get(timeout=timeout_s)

    def get_down(self, timeout_s: float = 30.0) -> LinkDown:
        """Skips frames."""
        while True:
            event = self.get(timeout_s)
            if isinstance(event, LinkDown):
                return event


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def listen(inbox: Inbox, slot_bytes: int) -> LinkListener:
    return LinkListener(
        host="127.0.0.1",
        incarnation=Incarnation(9),
        config=CONFIG,
        slot_bytes=slot_bytes,
        post=inbox.post,
    )


def start_sender(children: list[Child], listener: LinkListener, incarnation: int) -> Child:
    endpoint = listener.endpoint()
    child = Child("send", endpoint.host, endpoint.port, endpoint.token.hex(), 9, incarnation)
    children.append(child)
    assert child.hear() == ["ready"]
    return child


def start_receiver(
    children: list[Child], incarnation: int, slot_bytes: int
) -> tuple[Child, LinkPeer]:
    child = Child("receive", incarnation, slot_bytes)
    children.append(child)
    ready, port, token = child.hear()
    assert ready == "ready"
    endpoint = LinkEndpoint(host="127.0.0.1", port=int(port), token=bytes.fromhex(token))
    peer = LinkPeer(
        worker_id=WorkerId("d"), incarnation=Incarnation(incarnation), endpoint=endpoint
    )
    return child, peer


def make_pool(inbox: Inbox) -> LinkPool:
    me = SenderIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1), host="127.0.0.1")
    return LinkPool(me=me, config=CONFIG, post=inbox.post)


def outgoing(index: int, num_bytes: int) -> OutgoingFrame:
    payload = frame_payload(index, num_bytes)
    return OutgoingFrame(
        reservation_id=ReservationId(b"r%d" % index),
        frame_index=index,
        num_bytes=num_bytes,
        payload=payload,
    )


def tells_of_time(down: LinkDown) -> bool:
    """Says whether a time-out ended a link, and not the news that its peer has died."""
    return any(word in down.detail.lower() for word in ("timeout", "timed out", "within"))


def stop_in_mid_frame(child: Child, inbox: Inbox, push: Callable[[], None]) -> LinkEvent | None:
    """Stops a child while a large frame is on its way.

    Returns:
        What had been sent whole before it stood still, so that it was too late; None if it was not.
    """
    push()
    time.sleep(0.01)  # some of it has landed
    child.signal(signal.SIGSTOP)
    try:
        return inbox.get(0.2)
    except queue.Empty:
        return None


def stop_sender_in_mid_frame(sender: Child, listener: LinkListener, inbox: Inbox) -> None:
    """Lets it push large frames until it is stopped in the middle of one."""

    def push() -> None:
        sender.say("push", "aa" * 16, 0, LARGE)
        deadline_s = time.monotonic() + 30
        while not any(link.frames_in_flight for link in listener.links()):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    while (event := stop_in_mid_frame(sender, inbox, push)) is not None:
        assert isinstance(event, FrameLanded)
        listener.release_slot(event)
        sender.signal(signal.SIGCONT)


def stop_receiver_in_mid_frame(
    receiver: Child, peer: LinkPeer, pool: LinkPool, inbox: Inbox
) -> ReservationId:
    """Pushes large frames until it is stopped in the middle of one; returns whose that is."""
    frame = outgoing(1, LARGE)
    while (event := stop_in_mid_frame(receiver, inbox, lambda: pool.push(peer, frame))) is not None:
        assert isinstance(event, FrameSent)
        receiver.signal(signal.SIGCONT)
    return frame.reservation_id


def test_200_handoffs_over_one_pair_land_whole_and_in_order(
    children: list[Child], inbox: Inbox
) -> None:
    listener = listen(inbox, MIB)
    sender = start_sender(children, listener, incarnation=1)
    for number in range(200):
        sender.say("push", f"{number:032x}", number, 1 + number * 331)
    for number in range(200):
        landed = inbox.get()
        assert isinstance(landed, FrameLanded)
        assert landed.is_intact
        assert landed.frame_index == number
        assert landed.reservation_id == number.to_bytes(16, "big")
        assert torch.equal(
            listener.payload(landed), frame_payload(landed.frame_index, landed.num_bytes)
        )
        listener.release_slot(landed)
    listener.close()


def test_bandwidth_of_one_pair_is_printed(children: list[Child], inbox: Inbox) -> None:
    num_bytes, num_frames = 8 * MIB, 8
    listener = listen(inbox, num_bytes)
    sender = start_sender(children, listener, incarnation=1)
    times_s = []
    for _ in range(2):
        for number in range(num_frames):
            sender.say("push", "aa" * 16, number, num_bytes)
        for _ in range(num_frames):
            landed = inbox.get()
            assert isinstance(landed, FrameLanded)
            listener.release_slot(landed)
            times_s.append(time.monotonic())
    gib = (num_frames - 1) * num_bytes / (1 << 30)
    print(f"one pair: {gib / (times_s[-1] - times_s[num_frames]):.2f} GiB/s")
    listener.close()


def test_C1_a_sender_killed_in_mid_transfer_is_noticed_and_other_links_go_on(
    children: list[Child], inbox: Inbox
) -> None:
    listener = listen(inbox, LARGE)
    victim = start_sender(children, listener, incarnation=1)
    other = start_sender(children, listener, incarnation=2)
    other.say("push", "bb" * 16, 0, MIB)
    landed = inbox.get()
    assert isinstance(landed, FrameLanded)
    listener.release_slot(landed)
    stop_sender_in_mid_frame(victim, listener, inbox)
    victim.signal(signal.SIGKILL)
    down = inbox.get_down()
    assert down.link.peer == 1
    assert not tells_of_time(down)
    for number in range(1, 20):
        other.say("push", "bb" * 16, number, MIB)
        landed = inbox.get()
        assert isinstance(landed, FrameLanded)
        assert landed.link.peer == 2
        assert landed.is_intact
        listener.release_slot(landed)
    assert [link.peer for link in listener.links()] == [2]
    listener.close()


def test_a_receiver_killed_in_mid_transfer_is_noticed_with_the_reservations_it_lost(
    children: list[Child], inbox: Inbox
) -> None:
    receiver, peer = start_receiver(children, 9, LARGE)
    pool = make_pool(inbox)
    pool.push(peer, outgoing(0, MIB))
    assert isinstance(inbox.get(), FrameSent)
    begun = stop_receiver_in_mid_frame(receiver, peer, pool, inbox)
    pool.push(peer, outgoing(2, MIB))
    receiver.signal(signal.SIGKILL)
    down = inbox.get_down()
    assert down.lost == {begun, b"r2"}
    assert not tells_of_time(down)
    pool.close()


def test_a_stopped_sender_ends_its_link_at_the_time_out_and_links_anew_when_it_wakes(
    children: list[Child], inbox: Inbox
) -> None:
    listener = listen(inbox, LARGE)
    sender = start_sender(children, listener, incarnation=1)
    stop_sender_in_mid_frame(sender, listener, inbox)
    down = inbox.get_down()
    assert down.link.epoch == 1
    assert tells_of_time(down)
    sender.signal(signal.SIGCONT)
    assert sender.hear() == ["down", "1", "aa" * 16]
    sender.say("push", "cc" * 16, 3, MIB)
    landed = inbox.get()
    assert isinstance(landed, FrameLanded)
    assert landed.link.epoch == 2
    assert torch.equal(listener.payload(landed), frame_payload(3, MIB))
    listener.release_slot(landed)
    listener.close()


def test_a_stopped_receiver_ends_the_link_at_the_time_out(
    children: list[Child], inbox: Inbox
) -> None:
    receiver, peer = start_receiver(children, 9, LARGE)
    pool = make_pool(inbox)
    pool.push(peer, outgoing(0, MIB))
    assert isinstance(inbox.get(), FrameSent)
    receiver.signal(signal.SIGSTOP)
    pool.push(peer, outgoing(1, MIB))
    down = inbox.get_down()
    assert down.lost == {b"r1"}
    assert tells_of_time(down)
    pool.close()


def test_C2_a_restarted_receiver_is_another_peer(children: list[Child], inbox: Inbox) -> None:
    first, old_peer = start_receiver(children, 9, MIB)
    pool = make_pool(inbox)
    pool.push(old_peer, outgoing(0, MIB))
    assert isinstance(inbox.get(), FrameSent)
    first.signal(signal.SIGKILL)
    assert inbox.get_down().lost == frozenset()
    second, new_peer = start_receiver(children, 10, MIB)
    pool.push(new_peer, outgoing(1, MIB))
    sent = inbox.get()
    assert isinstance(sent, FrameSent)
    assert (sent.link.peer, sent.link.epoch) == (10, 1)
    assert second.hear() == ["landed", "1", "True"]
    pool.push(old_peer, outgoing(2, MIB))
    assert inbox.get_down().lost == {b"r2"}
    pool.close()
