"""What a listener of links bears from whoever connects, over loopback."""

import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kv_transfer.receiver import LinkListener
from pdserve.rpc.v1 import link_pb2
from tests.support.link_ends import (
    SLOT_BYTES,
    Inbox,
    listen,
    make_pool,
    outgoing,
    peer_of,
    wait_until,
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as cleanup:
        yield cleanup


@pytest.fixture
def arrivals() -> Inbox:
    return Inbox()


@pytest.fixture
def departures() -> Inbox:
    return Inbox()


class _Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._canary}",)


def frame_bytes(notice: link_pb2.LinkNotice) -> bytes:
    payload = notice.SerializeToString()
    return struct.pack("!I", len(payload)) + payload


def hello(token: bytes, epoch: int = 1) -> bytes:
    return frame_bytes(
        link_pb2.LinkNotice(
            hello=link_pb2.LinkHello(
                token=token,
                prefill_worker_id="p",
                prefill_incarnation=5,
                epoch=epoch,
                transports=["gloo"],
            )
        )
    )


def send_raw(receiver: LinkListener, data: bytes) -> bytes:
    """Returns what the listener answers until it closes the connection."""
    endpoint = receiver.endpoint()
    with socket.create_connection((endpoint.host, endpoint.port), 5) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while piece := connection.recv(4096):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def test_E1_garbage_and_pickles_end_the_connection_and_nothing_else(
    stack: ExitStack, arrivals: Inbox, departures: Inbox, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    bomb = pickle.dumps(_Bomb(canary))
    receiver = listen(stack, arrivals)
    attacks = [
        b"GET / HTTP/1.1\r\n\r\n",
        bomb,
        struct.pack("!I", len(bomb)) + bomb,
        b"\xff" * 64,
        struct.pack("!I", 0),
        frame_bytes(link_pb2.LinkNotice(bye=link_pb2.LinkBye())),
        hello(b""),
        hello(b"wrong" * 8),
        hello(receiver.endpoint().token[:-1]),
    ]
    for attack in attacks:
        assert send_raw(receiver, attack) == b""
    wait_until(lambda: receiver.num_rejected == len(attacks))
    assert not canary.exists()
    assert arrivals.is_empty
    pool = make_pool(stack, departures)
    pool.push(peer_of(receiver), outgoing(0))
    arrivals.landed()


def test_a_silent_connection_is_closed_at_the_deadline(stack: ExitStack, arrivals: Inbox) -> None:
    receiver = listen(stack, arrivals)
    assert send_raw(receiver, b"") == b""
    assert receiver.num_rejected == 1


def test_an_epoch_that_is_not_new_is_refused(stack: ExitStack, arrivals: Inbox) -> None:
    receiver = listen(stack, arrivals)
    token = receiver.endpoint().token
    assert send_raw(receiver, hello(token, epoch=3)) != b""
    arrivals.down()
    rejected = receiver.num_rejected
    send_raw(receiver, hello(token, epoch=3))
    wait_until(lambda: receiver.num_rejected == rejected + 1)


def test_a_frame_that_does_not_fit_a_slot_ends_the_link(
    stack: ExitStack, arrivals: Inbox, departures: Inbox
) -> None:
    receiver = listen(stack, arrivals)
    pool = make_pool(stack, departures)
    pool.push(peer_of(receiver), outgoing(0, num_bytes=SLOT_BYTES + 1))
    assert "bytes" in arrivals.down().detail
    assert departures.down().lost == {b"r"}


def test_the_listener_listens_on_its_one_address(stack: ExitStack, arrivals: Inbox) -> None:
    endpoint = listen(stack, arrivals).endpoint()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", endpoint.port), 1)


def test_a_closed_listener_ends_its_threads(arrivals: Inbox) -> None:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        listen(stack, arrivals)
        own = set(threading.enumerate()) - before
        assert own
    assert not any(thread.is_alive() for thread in own)
