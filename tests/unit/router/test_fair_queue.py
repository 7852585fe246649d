"""Turns: no tenant and no priority starves, and whoever waits is served."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import AGING_S, QUANTUM_TOKENS, FairQueue


def _push(queue: FairQueue[int], item: int, tenant: str, cost: int = 100, **over: float) -> None:
    queue.push(
        item,
        tenant=tenant,
        priority=int(over.get("priority", 0)),
        cost=cost,
        now_s=over.get("now_s", 0.0),
    )


def _drain(queue: FairQueue[int], now_s: float = 0.0) -> list[int]:
    return [queue.pop(now_s) for _ in range(len(queue))]


def test_one_tenant_is_served_in_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(5):
        _push(queue, item, "a", cost=10_000 - item)
    assert _drain(queue) == [0, 1, 2, 3, 4]


def test_a_tenant_with_a_hundred_requests_delays_another_by_its_share_only() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(100):
        _push(queue, item, "greedy", cost=QUANTUM_TOKENS)
    _push(queue, 100, "modest", cost=QUANTUM_TOKENS)
    assert _drain(queue).index(100) <= 2


def test_shares_are_counted_in_tokens_and_not_in_requests() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(40):
        _push(queue, item, "long", cost=8 * QUANTUM_TOKENS)
    for item in range(40, 400):
        _push(queue, item, "short", cost=QUANTUM_TOKENS)
    served = [queue.pop(0.0) for _ in range(90)]
    num_long = sum(item < 40 for item in served)
    assert num_long == pytest.approx(10, abs=1)


def test_a_higher_priority_goes_first_until_a_lower_one_has_aged() -> None:
    queue: FairQueue[int] = FairQueue()
    _push(queue, 0, "a", priority=1, now_s=0.0)
    _push(queue, 1, "a", priority=0, now_s=AGING_S / 2)
    assert queue.pop(AGING_S / 2) == 1
    _push(queue, 2, "a", priority=0, now_s=AGING_S)
    assert queue.pop(AGING_S) == 0


def test_a_removed_item_has_no_turn() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(3):
        _push(queue, item, "a")
    queue.remove(1)
    queue.remove(1)
    assert queue.tokens_before(0) == 200
    assert _drain(queue) == [0, 2]
    assert queue.tokens_before(9) == 0


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 200_000), st.booleans()
        ),
        max_size=60,
    )
)
def test_everything_that_waits_is_served_once(
    steps: list[tuple[str, int, int, bool]],
) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: set[int] = set()
    for item, (tenant, priority, cost, pops) in enumerate(steps):
        queue.push(item, tenant=tenant, priority=priority, cost=cost, now_s=float(item))
        waiting.add(item)
        if pops:
            waiting.remove(queue.pop(float(item)))
        assert len(queue) == len(waiting)
    assert sorted(_drain(queue, 1000.0)) == sorted(waiting)
    assert queue.tokens_before(9) == 0


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=30),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=30),
)
def test_no_tenant_that_waits_falls_behind_by_more_than_its_largest_request(
    first: list[int], second: list[int]
) -> None:
    queue: FairQueue[int] = FairQueue()
    costs = {}
    for tenant, sizes in (("a", first), ("b", second)):
        for cost in sizes:
            costs[len(costs)] = (tenant, cost)
            _push(queue, len(costs) - 1, tenant, cost=cost)
    served: Counter[str] = Counter()
    left = Counter(a=len(first), b=len(second))
    bound = max(*first, *second) + 2 * QUANTUM_TOKENS
    while left["a"] and left["b"]:
        tenant, cost = costs[queue.pop(0.0)]
        served[tenant] += cost
        left[tenant] -= 1
        assert abs(served["a"] - served["b"]) <= bound


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 5))
def test_no_priority_starves_behind_a_stream_of_higher_ones(low: int, per_second: int) -> None:
    queue: FairQueue[int] = FairQueue()
    _push(queue, -1, "patient", priority=low)
    served_at_s = None
    for second in range(1, 60):
        for number in range(per_second):
            _push(queue, second * 100 + number, "busy", priority=0, now_s=float(second))
        if any(queue.pop(float(second)) == -1 for _ in range(per_second)):
            served_at_s = second
            break
    assert served_at_s is not None
    assert served_at_s <= low * AGING_S + 1
