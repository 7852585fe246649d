from random import Random

import pytest

from pdserve.rpc.framing import Framing, MessageTooLong, PacketFraming, StreamFraming

MESSAGES = [b"", b"x", bytes(range(256)) * 700, b"", b"end"]


def test_packets_join_to_the_messages_that_were_cut() -> None:
    framing = PacketFraming(1 << 20)
    packets = [packet for message in MESSAGES for packet in framing.cut(message)]
    assert [found for packet in packets for found in framing.feed(packet)] == MESSAGES
    assert not framing.holds_part


def test_a_stream_is_cut_at_its_lengths_wherever_it_was_torn() -> None:
    stream = b"".join(piece for message in MESSAGES for piece in StreamFraming(0).cut(message))
    random = Random(3)
    for _ in range(50):
        framing, found, rest = StreamFraming(1 << 20), [], stream
        while rest:
            size = random.choice((1, 2, 3, 5, 1000, 200_000))
            found += framing.feed(rest[:size])
            rest = rest[size:]
        assert found == MESSAGES
        assert not framing.holds_part


def test_a_message_under_way_is_known_to_be_unfinished() -> None:
    framing = StreamFraming(100)
    assert framing.feed(b"\x00\x00") == []
    assert framing.holds_part
    assert framing.feed(b"\x00\x01x") == [b"x"]
    assert not framing.holds_part


@pytest.mark.parametrize("make", [PacketFraming, StreamFraming])
def test_a_message_over_the_bound_is_refused(make: type[PacketFraming | StreamFraming]) -> None:
    sender: Framing = make(1 << 20)
    receiver: Framing = make(10)
    assert receiver.feed(sender.cut(b"0123456789")[0]) == [b"0123456789"]
    with pytest.raises(MessageTooLong, match="10"):
        receiver.feed(sender.cut(b"0123456789a")[0])


def test_an_announced_length_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(MessageTooLong, match="4294967295 bytes, at most 4096"):
        StreamFraming(4096).feed(b"\xff\xff\xff\xff")
