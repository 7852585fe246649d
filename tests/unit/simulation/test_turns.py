from dataclasses import replace

import pytest

from pdserve.predictor.profile import Profile
from simulation.cluster import Cluster
from simulation.record import Outcome, Record
from simulation.shape import ClusterShape
from simulation.workload import Arrival, Piece, make_workload

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.004, 2e-5, 1e-9),
    decode=(0.004, 2e-5, 3e-8),
    transfer=(0.001, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=640_000,
    max_num_batched_tokens=2048,
)
SHAPE = ClusterShape(prefill=PROFILE, decode=PROFILE, num_prefill=1, num_decode=1)


def arrival(number: int, tenant: str, priority: int = 0) -> Arrival:
    return Arrival(
        at_s=0.0001 * number,
        pieces=(Piece(number, 2000),),
        num_output_tokens=2,
        tenant=tenant,
        priority=priority,
    )


def run(shape: ClusterShape, *arrivals: Arrival) -> tuple[Record, ...]:
    records = Cluster(shape).run(make_workload("w", arrivals)).records
    return tuple(sorted(records, key=lambda one: one.at_s))


@pytest.mark.parametrize("priority", [0, 1])
def test_a_tenant_with_one_request_need_not_wait_for_one_with_many(priority: int) -> None:
    many = [arrival(number, "many", priority) for number in range(30)]
    *others, one = run(SHAPE, *many, arrival(30, "one"))
    assert sum(other.ttft_s > one.ttft_s for other in others) > 20


def test_without_the_waiting_room_it_waits_for_all_that_came_before() -> None:
    many = [arrival(number, "many") for number in range(30)]
    shape = replace(SHAPE, has_waiting_room=False)
    *others, one = run(shape, *many, arrival(30, "one"))
    assert all(other.ttft_s < one.ttft_s for other in others)


def test_who_would_wait_too_long_for_its_turn_is_refused_at_once() -> None:
    shape = replace(SHAPE, ttft_slo_s=0.5)
    records = run(shape, *(arrival(number, "all") for number in range(60)))
    refused = [one for one in records if one.outcome is Outcome.REFUSED]
    served = [one.ttft_s for one in records if one.outcome is Outcome.DONE]
    assert refused
    assert len(refused) + len(served) == 60
    # A prompt that is cut by the end of a step pays for one more, which nobody foresees.
    assert max(served) < 0.51
