"""Notices over a real socket pair."""

import socket
from collections.abc import Iterator

import pytest

from kv_transfer.notices import LinkBroken, NoticeChannel
from pdserve.rpc.v1.link_pb2 import LinkBye, LinkNotice


@pytest.fixture
def channels() -> Iterator[tuple[NoticeChannel, NoticeChannel]]:
    ours, theirs = map(NoticeChannel, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def notice_of(number: int) -> LinkNotice:
    return LinkNotice(bye=LinkBye(failure=f"{number} " + "x" * 900))


def test_a_notice_that_finds_no_room_is_left_out_whole(
    channels: tuple[NoticeChannel, NoticeChannel],
) -> None:
    ours, theirs = channels
    count = 0
    while ours.try_send(notice_of(count)):
        count += 1
    assert count > 10
    for number in range(count):
        assert theirs.expect("bye", 1.0) == notice_of(number)
    assert theirs.receive(0.0) is None
    assert ours.try_send(notice_of(count)), "there is room again"
    assert theirs.expect("bye", 1.0) == notice_of(count)


def test_a_notice_to_a_peer_that_is_gone_breaks_the_link(
    channels: tuple[NoticeChannel, NoticeChannel],
) -> None:
    ours, theirs = channels
    theirs.close()
    with pytest.raises(LinkBroken, match="the notice socket broke"):
        ours.try_send(notice_of(0))
