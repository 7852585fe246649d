import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from pdserve.rpc.channel import (
    AsyncChannel,
    BlockingChannel,
    ChannelClosed,
    make_pair,
    prepare_stream,
)

Pair = tuple[socket.socket, socket.socket]


def make_tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        prepare_stream(end, silence_s=4.0)
    return ours, theirs


both_kinds = pytest.mark.parametrize("make", [make_pair, make_tcp_pair])


@both_kinds
def test_a_message_comes_out_as_it_went_in(make: Callable[[], Pair]) -> None:
    ours, theirs = make()
    left, right = BlockingChannel(ours), BlockingChannel(theirs)
    for message in (b"", b"x", b"y" * 1000):
        left.send(message)
        assert right.receive() == message


@both_kinds
def test_a_message_larger_than_any_socket_buffer_arrives_whole(make: Callable[[], Pair]) -> None:
    ours, theirs = make()
    left, right = BlockingChannel(ours), BlockingChannel(theirs)
    message = bytes(range(256)) * 20_000
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.receive() == message
    sender.join()


@both_kinds
def test_a_closed_end_is_reported_to_both_directions(make: Callable[[], Pair]) -> None:
    ours, theirs = make()
    left, right = BlockingChannel(ours), BlockingChannel(theirs)
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive()

    def send_on() -> None:
        # Over TCP the first one only finds out.
        for _ in range(3):
            right.send(b"x")

    with pytest.raises(ChannelClosed):
        send_on()


@both_kinds
async def test_concurrent_senders_never_mix_their_packets(make: Callable[[], Pair]) -> None:
    ours, theirs = make()
    left, right = AsyncChannel(ours), AsyncChannel(theirs)
    messages = [bytes([i]) * 300_000 for i in range(6)]
    senders = [asyncio.create_task(left.send(message)) for message in messages]
    received = [await right.receive() for _ in messages]
    await asyncio.gather(*senders)
    assert sorted(received) == messages
    left.close()
    right.close()


def test_a_stream_breaks_when_the_peers_kernel_is_silent() -> None:
    ours, theirs = make_tcp_pair()
    options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
    assert [ours.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [4000, 1, 1]
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    ours.close()
    theirs.close()


async def test_a_stranger_may_send_less_than_a_trusted_end() -> None:
    ours, theirs = make_tcp_pair()
    left, right = AsyncChannel(ours), AsyncChannel(theirs, max_message_bytes=16)
    right.trust()
    await left.send(b"x" * 17)
    assert await right.receive() == b"x" * 17
    left.close()
    right.close()
    ours, theirs = make_tcp_pair()
    left, right = AsyncChannel(ours), AsyncChannel(theirs, max_message_bytes=16)
    await left.send(b"x" * 17)
    with pytest.raises(ChannelClosed, match="at most 16"):
        await right.receive()
    left.close()
    right.close()


async def test_a_socket_is_given_away_only_when_nothing_of_it_was_read_ahead() -> None:
    ours, theirs = make_tcp_pair()
    left, right = AsyncChannel(ours), AsyncChannel(theirs)
    await left.send(b"one")
    assert await right.receive() == b"one"
    assert right.detach() is theirs
    await left.send(b"two")
    await left.send(b"three")
    assert await right.receive() == b"two"
    with pytest.raises(ChannelClosed, match="out of turn"):
        right.detach()
    left.close()
    right.close()
