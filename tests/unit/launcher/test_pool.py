from dataclasses import replace

import pytest

from launcher.pool import Drain, Flip, Member, Order, Scale, SizePlan, check_order, plan_size
from pdserve.errors import ConfigError
from pdserve.request import Role
from tests.support.records import make_record

RECORD = make_record("any")


def member(worker_id: str, *, is_draining: bool = False, is_starting: bool = False) -> Member:
    return Member(
        worker_id=worker_id,
        role=Role(worker_id.rpartition("-")[0]),
        face_pid=1,
        num_restarts=0,
        is_draining=is_draining,
        record=None if is_starting else RECORD,
    )


POOLS = (member("prefill-0"), member("decode-0"), member("decode-1"))


def scale(num_replicas: int, role: Role = Role.DECODE) -> Scale:
    return Scale(role=role, num_replicas=num_replicas)


def test_pool_grows_by_the_lowest_free_numbers() -> None:
    members = (member("decode-0"), member("decode-2"))
    assert plan_size(members, scale(4)) == SizePlan(added=("decode-1", "decode-3"))


def test_pool_shrinks_by_the_highest_numbers() -> None:
    members = tuple(member(f"decode-{i}") for i in (10, 9, 2))
    assert plan_size(members, scale(1)) == SizePlan(retired=("decode-9", "decode-10"))


def test_C15_those_that_start_leave_before_those_that_serve() -> None:
    members = (member("decode-0", is_starting=True), member("decode-1"), member("decode-2"))
    assert plan_size(members, scale(2)) == SizePlan(retired=("decode-0",))
    assert plan_size(members, scale(1)) == SizePlan(retired=("decode-0", "decode-2"))


def test_pool_that_may_be_empty_loses_its_last() -> None:
    check_order(POOLS, scale(0), pools=Role, can_be_empty=True)
    check_order(POOLS, Drain(worker_id="prefill-0"), pools=Role, can_be_empty=True)
    with pytest.raises(ConfigError):
        check_order(POOLS, scale(-1), pools=Role, can_be_empty=True)


def test_empty_pool_grows_again() -> None:
    assert plan_size((), scale(2)) == SizePlan(added=("decode-0", "decode-1"))


def test_pool_of_the_right_size_stays() -> None:
    assert plan_size(POOLS, scale(2)) == SizePlan()


def test_name_of_one_that_still_drains_is_not_given_away() -> None:
    members = (member("decode-0"), member("decode-1", is_draining=True))
    assert plan_size(members, scale(2)) == SizePlan(added=("decode-2",))


def test_other_pool_is_not_touched() -> None:
    assert plan_size(POOLS, scale(3, Role.PREFILL)) == SizePlan(added=("prefill-1", "prefill-2"))


def test_drain_retires_one_and_only_once() -> None:
    assert plan_size(POOLS, Drain(worker_id="decode-0")) == SizePlan(retired=("decode-0",))
    draining = (member("decode-0", is_draining=True), member("decode-1"))
    assert plan_size(draining, Drain(worker_id="decode-0")) == SizePlan()


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (scale(0), "a decode pool needs a replica, got 0"),
        (Drain(worker_id="prefill-0"), "prefill-0 is the last of the prefill pool"),
        (
            Flip(worker_id="prefill-0", role=Role.DECODE),
            "prefill-0 is the last of the prefill pool",
        ),
    ],
)
def test_pool_that_would_be_empty_is_refused(order: Order, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_order(POOLS, order, pools=Role)


def test_last_that_does_not_drain_already_is_refused() -> None:
    members = (member("decode-0"), member("decode-1", is_draining=True))
    with pytest.raises(ConfigError, match="decode-0 is the last"):
        check_order(members, Drain(worker_id="decode-0"), pools=Role)


def test_pool_that_was_never_started_is_refused() -> None:
    with pytest.raises(ConfigError, match="started without a prefill pool"):
        check_order((member("decode-0"),), scale(1, Role.PREFILL), pools=[Role.DECODE])


def test_unknown_replica_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        check_order(POOLS, Drain(worker_id="decode-7"), pools=Role)


def test_replica_that_has_flipped_keeps_its_name_and_nobody_else_gets_it() -> None:
    flipped = replace(member("prefill-1"), role=Role.DECODE)
    found = plan_size((*POOLS, flipped), scale(2, Role.PREFILL))
    assert found == SizePlan(added=("prefill-2",))


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (member("decode-2", is_draining=True), "decode-2 drains for good"),
        (member("decode-2", is_starting=True), "decode-2 does not serve as a decode replica yet"),
        (replace(member("decode-2"), role=Role.PREFILL), "decode-2 is a prefill replica already"),
    ],
    ids=["leaves", "starts, or flips already", "is what it should become"],
)
def test_replica_that_cannot_flip_now_is_refused(one: Member, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_order((*POOLS, one), Flip(worker_id="decode-2", role=Role.PREFILL), pools=Role)


def test_pool_that_may_be_empty_gives_its_last_replica_away_to_nobody() -> None:
    last = Flip(worker_id="prefill-0", role=Role.DECODE)
    with pytest.raises(ConfigError, match="prefill-0 is the last of the prefill pool"):
        check_order(POOLS, last, pools=Role, can_be_empty=True)
    check_order(POOLS, Drain(worker_id="prefill-0"), pools=Role, can_be_empty=True)


def test_flip_to_a_pool_that_was_never_started_is_refused() -> None:
    members = (member("decode-0"), member("decode-1"))
    with pytest.raises(ConfigError, match="started without a prefill pool"):
        check_order(members, Flip(worker_id="decode-0", role=Role.PREFILL), pools=[Role.DECODE])
