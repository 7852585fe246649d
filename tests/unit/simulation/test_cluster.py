from dataclasses import replace

import pytest

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from pdserve.request import Role, WorkerId
from router.worker_key import WorkerKey
from simulation.cluster import Cluster
from simulation.generators import Lengths, make_agent_tree, make_hot_prefix, make_plain
from simulation.record import Outcome, Record
from simulation.shape import ClusterShape
from simulation.workload import Arrival, Piece, Workload, make_workload

PROFILE = Profile(
    worker_class="toy",
    prefill=(0.004, 2e-5, 1e-9),
    decode=(0.004, 2e-5, 3e-8),
    transfer=(0.001, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=64_000,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
)
LENGTHS = Lengths(mean_prompt_tokens=600, mean_output_tokens=40)


def shape_of(num_prefill: int = 2, num_decode: int = 2, **over: object) -> ClusterShape:
    profile = replace(PROFILE, kv_tokens=over.pop("kv_tokens", PROFILE.kv_tokens))
    return ClusterShape(
        prefill=profile, decode=profile, num_prefill=num_prefill, num_decode=num_decode, **over
    )


def run(
    shape: ClusterShape, workload: Workload, cluster: Cluster | None = None
) -> tuple[Record, ...]:
    cluster = cluster or Cluster(shape)
    records = cluster.run(workload).records
    for ledger in cluster.nodes.ledgers():
        assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks
        assert (ledger.sequences, ledger.reservations, ledger.held_handoffs) == (0, 0, 0)
    assert len(records) == len(workload.arrivals)
    return tuple(sorted(records, key=lambda one: one.at_s))


def lone(num_prompt: int, num_output: int) -> Workload:
    pieces = (Piece(1, num_prompt),)
    return make_workload("w", [Arrival(at_s=1.0, pieces=pieces, num_output_tokens=num_output)])


def find(cluster: Cluster, name: str) -> WorkerKey:
    return next(node.key for node in cluster.nodes if node.key.worker_id == WorkerId(name))


def test_a_lone_request_takes_what_the_laws_say():
    shape = shape_of(1, 1, router_s=0.01, control_s=0.002)
    (record,) = run(shape, lone(1000, 11))
    prefill_s = PROFILE.prefill_s(1000, 0)
    assert record.ttft_s == pytest.approx(0.01 + 0.002 + prefill_s + 0.002)
    steps_s = [PROFILE.decode_step_s(1, 1001 + step) for step in range(10)]
    # The last chunk is on the link when the first token is sampled.
    transfer_s = PROFILE.transfer_s(1000 * PROFILE.kv_bytes_per_token)
    assert record.hand_over_s == pytest.approx(transfer_s + steps_s[0], abs=0.003)
    assert record.tpot_s == pytest.approx((transfer_s + sum(steps_s)) / 10, rel=0.05)
    assert record.outcome is Outcome.DONE


def test_a_single_token_needs_no_hand_off():
    (record,) = run(shape_of(1, 1), lone(500, 1))
    assert (record.outcome, record.tpot_s, record.hand_over_s) == (Outcome.DONE, 0.0, None)


@pytest.mark.parametrize("kv_tokens", [64_000, 6_400])
def test_everything_ends_and_no_block_is_lost(kv_tokens: int):
    shape = shape_of(kv_tokens=kv_tokens)
    records = run(shape, make_plain(400, 60.0, LENGTHS, 1))
    assert all(one.outcome is Outcome.DONE for one in records)


def test_the_same_workload_gives_the_same_figures_again():
    workload = make_hot_prefix(300, 80.0, LENGTHS, 2, num_prefixes=4, prefix_tokens=1024)
    assert run(shape_of(), workload) == run(shape_of(), workload)


def test_skipped_steps_change_no_request():
    workload = make_plain(250, 40.0, LENGTHS, 3)
    skipped = run(shape_of(), workload)
    stepwise = run(shape_of(skips_steps=False), workload)
    for ours, its in zip(skipped, stepwise, strict=True):
        assert ours.ttft_s == pytest.approx(its.ttft_s, abs=1e-9)
        assert ours.end_s == pytest.approx(its.end_s, abs=1e-9)
        assert ours.hand_over_s == pytest.approx(its.hand_over_s, abs=1e-9)


def test_skipping_counts_the_gaps_between_tokens_too():
    workload = make_plain(100, 40.0, LENGTHS, 3)
    skipping, stepwise = Cluster(shape_of()), Cluster(shape_of(skips_steps=False))
    ours, its = skipping.run(workload).gaps, stepwise.run(workload).gaps
    assert ours.num_gaps == its.num_gaps == workload.num_output_tokens - 100
    assert ours.percentile(50) == pytest.approx(its.percentile(50), rel=0.05)


def test_a_shared_prefix_is_found_where_it_was_computed():
    workload = make_hot_prefix(200, 10.0, LENGTHS, 2, num_prefixes=2, prefix_tokens=1024)
    records = run(shape_of(), workload)
    assert sum(one.cached_tokens >= 1024 for one in records) > 190


def test_turns_of_agents_find_their_own_beginning():
    records = run(shape_of(), make_agent_tree(20, 0.5, LENGTHS, 2, num_turns=4))
    share = sum(one.cached_tokens for one in records) / sum(
        one.num_prompt_tokens for one in records
    )
    assert share > 0.5


@pytest.mark.parametrize("name", ["prefill-0", "prefill-1"])
def test_requests_of_a_dead_prefill_worker_are_computed_elsewhere(name: str):
    shape = shape_of()
    cluster = Cluster(shape)
    cluster.queue.at(2.0, lambda: cluster.kill(find(cluster, name)))
    records = run(shape, make_plain(300, 60.0, LENGTHS, 1), cluster)
    assert all(one.outcome is Outcome.DONE for one in records)
    assert max(one.attempts for one in records) == 2


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
def test_requests_of_a_dead_decode_worker_go_on_elsewhere(name: str):
    shape = shape_of()
    cluster = Cluster(shape)
    cluster.queue.at(2.0, lambda: cluster.kill(find(cluster, name)))
    records = run(shape, make_plain(300, 60.0, LENGTHS, 1), cluster)
    assert all(one.outcome is Outcome.DONE for one in records)
    assert max(one.attempts for one in records) == 2
    whole = run(shape, make_plain(300, 60.0, LENGTHS, 1))
    assert sum(one.end_s for one in records) > sum(one.end_s for one in whole)


def test_requests_wait_for_a_pool_that_is_gone_and_go_on_when_it_is_back():
    shape = shape_of(1, 1)
    cluster = Cluster(shape)
    cluster.queue.at(1.0, lambda: cluster.kill(find(cluster, "prefill-0")))
    cluster.queue.at(9.0, lambda: cluster.add_worker(Role.PREFILL, WorkerId("prefill-9")))
    records = run(shape, make_plain(60, 20.0, LENGTHS, 1), cluster)
    assert all(one.outcome is Outcome.DONE for one in records)
    assert max(one.ttft_s for one in records) > 6


def test_a_slow_worker_is_slow():
    workload = make_plain(100, 10.0, LENGTHS, 1)
    shape = shape_of(1, 1)
    cluster = Cluster(shape)
    cluster.slow_down(find(cluster, "decode-0"), 4.0)
    slow, whole = run(shape, workload, cluster), run(shape, workload)
    assert sum(one.tpot_s for one in slow) > 3 * sum(one.tpot_s for one in whole)


def test_without_a_prefill_pool_decode_workers_do_it_all():
    records = run(shape_of(0, 2), make_plain(150, 20.0, LENGTHS, 1))
    assert all(one.outcome is Outcome.DONE for one in records)
    for one in records:
        assert one.ttft_s > PROFILE.prefill_s(one.num_prompt_tokens, 0)


def test_admission_refuses_what_exceeds_its_limit():
    records = run(shape_of(1, 1, max_in_flight=10), make_plain(200, 200.0, LENGTHS, 1))
    outcomes = [one.outcome for one in records]
    assert 0 < outcomes.count(Outcome.REFUSED) < 190
    assert outcomes.count(Outcome.DONE) + outcomes.count(Outcome.REFUSED) == 200


def test_what_would_miss_its_first_token_is_refused_before_it_is_computed():
    workload = make_plain(300, 200.0, LENGTHS, 1)
    records = run(shape_of(1, 2, ttft_slo_s=0.2), workload)
    served = [one for one in records if one.outcome is Outcome.DONE]
    assert 50 < len(served) < 250
    assert sum(one.ttft_s <= 0.25 for one in served) > 0.9 * len(served)
    without = run(shape_of(1, 2), workload)
    assert sum(one.ttft_s <= 0.25 for one in without) < len(served) / 2


def test_what_no_worker_can_hold_ends_as_too_long():
    (record,) = run(shape_of(), lone(70_000, 5))
    assert record.outcome is Outcome.TOO_LONG


def test_what_the_end_of_the_simulation_cuts_off_is_unfinished():
    workload = make_plain(100, 20.0, LENGTHS, 1)
    records = Cluster(shape_of()).run(workload, until_s=2.0).records
    assert any(one.outcome is Outcome.UNFINISHED for one in records)
    assert any(one.outcome is Outcome.DONE for one in records)


def test_blocks_that_do_not_divide_the_index_s_granule_are_refused():
    profile = replace(PROFILE, block_size=256)
    with pytest.raises(ConfigError, match="block_size must divide 128"):
        ClusterShape(prefill=profile, decode=profile, num_prefill=1, num_decode=1)
