"""Ranks 1 and up on their way to another role, as rank 0 hears of them."""

from pdserve.rank.followers import Followers, Leader, RoleChange
from pdserve.rank.inbox import Inbox
from pdserve.request import Role
from pdserve.rpc.channel import BlockingChannel, make_pair
from pdserve.rpc.v1 import handoff_pb2, rank_pb2

TIMEOUT_S = 5.0


def ready(rank: int) -> rank_pb2.FromFollower:
    """A rank that listens at a port of its own."""
    link = handoff_pb2.LinkEndpoint(host="127.0.0.1", port=7000 + rank)
    return rank_pb2.FromFollower(ready=rank_pb2.FollowerReady(rank=rank, link=link))


def test_others_are_there_when_each_has_said_so_and_come_in_the_order_of_ranks() -> None:
    change = RoleChange(3)
    for rank in (3, 1):
        change.take(ready(rank))
        assert change.links is None
    change.take(ready(2))
    assert change.links is not None
    assert [link.port for link in change.links] == [7001, 7002, 7003]


def test_what_links_of_the_old_role_still_say_is_dropped() -> None:
    change = RoleChange(1)
    change.take(rank_pb2.FromFollower(sent=rank_pb2.FrameSent(frame_index=3)))
    change.take(rank_pb2.FromFollower(down=rank_pb2.LinkDown(worker_id="decode-0")))
    change.take(rank_pb2.ToRank(cancel=None))
    assert change.links is None
    change.take(ready(1))
    assert change.links is not None


def test_a_prefill_rank_is_there_although_it_listens_nowhere() -> None:
    change = RoleChange(1)
    change.take(rank_pb2.FromFollower(ready=rank_pb2.FollowerReady(rank=1)))
    assert change.links == (handoff_pb2.LinkEndpoint(),)


def test_an_only_rank_waits_for_nobody() -> None:
    assert RoleChange(0).links == ()


def test_order_to_change_comes_behind_all_that_was_ordered_before() -> None:
    ours, theirs = make_pair()
    followers = Followers([BlockingChannel(ours)])
    followers.send(1, rank_pb2.ToFollower(cancel_frames=rank_pb2.CancelFrames()))
    followers.change_role(rank_pb2.ChangeRole(role=Role.DECODE, incarnation=9))
    inbox = Inbox()
    Leader(BlockingChannel(theirs)).read_into(inbox)
    orders: list[object] = []
    while len(orders) < 2:
        found = inbox.drain(TIMEOUT_S)
        assert found, "nothing came"
        orders += found
    assert [order.WhichOneof("message") for order in orders] == [  # type: ignore[attr-defined]
        "cancel_frames",
        "change_role",
    ]
    ours.close()
