import asyncio
import threading

import pytest

from pdserve.rpc.channel import AsyncChannel, BlockingChannel, ChannelClosed, make_pair


def test_a_message_comes_out_as_it_went_in() -> None:
    ours, theirs = make_pair()
    left, right = BlockingChannel(ours), BlockingChannel(theirs)
    for message in (b"", b"x", b"y" * 1000):
        left.send(message)
        assert right.receive() == message


def test_a_message_larger_than_any_socket_buffer_arrives_whole() -> None:
    ours, theirs = make_pair()
    left, right = BlockingChannel(ours), BlockingChannel(theirs)
    message = bytes(range(256)) * 20_000
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.receive() == message
    sender.join()


def test_a_closed_end_is_reported_to_both_directions() -> None:
    ours, theirs = make_pair()
    left, right = BlockingChannel(ours), BlockingChannel(theirs)
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.send(b"x")


async def test_concurrent_senders_never_mix_their_packets() -> None:
    ours, theirs = make_pair()
    left, right = AsyncChannel(ours), AsyncChannel(theirs)
    messages = [bytes([i]) * 300_000 for i in range(6)]
    senders = [asyncio.create_task(left.send(message)) for message in messages]
    received = [await right.receive() for _ in messages]
    await asyncio.gather(*senders)
    assert sorted(received) == messages
    left.close()
    right.close()
