"""One decision at a time: figures in, changes out."""

from dataclasses import replace

from autoscaler.figures import Traffic
from autoscaler.settings import PoolRange
from pdserve.request import Role
from tests.unit.autoscaler.clocked_policy import BUSY, CALM, PAIR, SETTINGS, Clocked, kinds, worker


def test_pools_in_balance_are_left_alone() -> None:
    assert Clocked().see(*PAIR, seconds=30) == []


def test_backlog_makes_prefill_grow_although_nothing_arrives_any_more() -> None:
    loaded = worker("prefill-0", queued_tokens=500_000, num_running=1)
    decisions = Clocked().see(loaded, PAIR[1])
    assert kinds(decisions) == [("grow", Role.PREFILL, 2)]
    assert decisions[0].numbers.backlog_tokens == 500_000
    assert decisions[0].numbers.backlog_s is not None
    assert decisions[0].numbers.backlog_s > 10


def test_waiting_tokens_make_prefill_grow_while_nobody_knows_how_long_they_take() -> None:
    loaded = worker("prefill-0", queued_tokens=5_000, num_running=1)
    decisions = Clocked(is_fitted=False).see(loaded, PAIR[1])
    assert kinds(decisions) == [("grow", Role.PREFILL, 2)]
    assert decisions[0].numbers.backlog_s is None
    assert decisions[0].numbers.why == "waiting tokens"


def test_starting_replicas_count_so_that_a_need_is_ordered_once() -> None:
    clocked = Clocked()
    loaded = worker("prefill-0", queued_tokens=250_000, num_running=1)
    assert kinds(clocked.see(loaded, PAIR[1])) == [("grow", Role.PREFILL, 2)]
    starting = worker("prefill-1", is_serving=False)
    assert clocked.see(loaded, starting, PAIR[1], seconds=15) == []


def test_dynamos_queue_blind_case_old_requests_grow_prefill_whatever_the_figures_say() -> None:
    # All rates and queues read zero, and yet somebody waits.
    waiting = replace(BUSY, oldest_s=2.0)
    decisions = Clocked().see(*PAIR, traffic=waiting, seconds=5)
    assert kinds(decisions) == [("grow", Role.PREFILL, 2)]
    assert decisions[0].numbers.why == "the oldest request waits too long"


def test_pool_that_grew_for_old_requests_alone_waits_before_it_grows_again() -> None:
    clocked = Clocked()
    waiting = replace(BUSY, oldest_s=2.0)
    clocked.see(*PAIR, traffic=waiting, seconds=5)
    busy = [worker(f"prefill-{i}", num_running=1) for i in range(2)]
    assert clocked.see(*busy, PAIR[1], traffic=waiting, seconds=15) == []
    assert len(clocked.see(*busy, PAIR[1], traffic=waiting, seconds=15)) == 1


def test_old_request_does_not_grow_a_pool_of_twice_its_need_with_replicas_that_are_idle() -> None:
    # One prompt is so long that it is late on any replica; the others have nothing to do.
    pool = (worker("prefill-0", num_running=1, queued_tokens=900), worker("prefill-1"), PAIR[1])
    assert Clocked().see(*pool, traffic=replace(BUSY, oldest_s=9.0), seconds=60) == []
    alone = Clocked().see(pool[0], PAIR[1], traffic=replace(BUSY, oldest_s=9.0), seconds=5)
    assert kinds(alone) == [("grow", Role.PREFILL, 2)]


def test_sequences_that_fill_the_kv_make_decode_grow() -> None:
    full = worker("decode-0", num_running=20, used_blocks=900)
    decisions = Clocked().see(PAIR[0], full)
    assert kinds(decisions) == [("grow", Role.DECODE, 2)]
    assert decisions[0].numbers.why == "KV"
    assert decisions[0].numbers.kv_share == 0.9


def test_batch_that_is_too_slow_makes_decode_grow() -> None:
    # 60 sequences take 20 + 60 x 0.6 = 56 ms a step; 50 ms are wanted.
    slow = worker("decode-0", num_running=60, used_blocks=100)
    decisions = Clocked().see(PAIR[0], slow)
    assert kinds(decisions) == [("grow", Role.DECODE, 2)]
    assert decisions[0].numbers.why == "TPOT"


def test_no_number_of_replicas_helps_when_one_sequence_is_too_slow_by_itself() -> None:
    clocked = Clocked(replace(SETTINGS, tpot_s=0.01))
    assert clocked.see(PAIR[0], worker("decode-0", num_running=10, used_blocks=100)) == []


def test_decode_does_not_grow_while_prefill_starves() -> None:
    starving = worker("prefill-0", queued_tokens=500_000, num_running=1)
    slow = worker("decode-0", num_running=60, used_blocks=100)
    clocked = Clocked()
    assert kinds(clocked.see(starving, slow)) == [("grow", Role.PREFILL, 2)]
    assert clocked.policy.numbers[Role.DECODE].why == "held back: prefill starves"


def test_prefill_does_not_grow_while_decode_is_full() -> None:
    starving = worker("prefill-0", queued_tokens=500_000, num_held=8)
    full = worker("decode-0", num_running=64, used_blocks=990)
    clocked = Clocked()
    waiting = replace(BUSY, oldest_s=30.0)
    decisions = clocked.see(starving, full, traffic=waiting)
    assert kinds(decisions) == [("grow", Role.DECODE, 2)]
    assert clocked.policy.numbers[Role.PREFILL].why == "held back: decode is full"


def test_held_prompts_count_as_sequences_that_decode_has_to_take() -> None:
    held = worker("prefill-0", num_held=40)
    decisions = Clocked().see(held, worker("decode-0", num_running=40, used_blocks=300))
    assert kinds(decisions) == [("grow", Role.DECODE, 2)]


def test_pool_shrinks_to_what_survivors_can_carry_after_it_settled() -> None:
    clocked = Clocked()
    three = (*PAIR, worker("decode-1", num_running=1), worker("decode-2"))
    assert clocked.see(*three, seconds=299) == []
    decisions = clocked.see(*three, seconds=3)
    assert kinds(decisions) == [("shrink", Role.DECODE, 1)]
    assert decisions[0].retired == ("decode-0", "decode-2")


def test_pool_does_not_shrink_when_the_survivors_would_not_fit() -> None:
    # Each of two holds 45 % of its KV: one alone would be at 90 % and 80 % are allowed.
    pair = [worker(f"decode-{i}", num_running=10, used_blocks=450) for i in range(2)]
    assert Clocked().see(PAIR[0], *pair, seconds=900) == []


def test_idle_is_data_a_pool_without_requests_goes_to_its_least_size() -> None:
    clocked = Clocked()
    four = [worker(f"prefill-{i}") for i in range(4)]
    decisions = clocked.see(*four, PAIR[1], traffic=CALM, seconds=400)
    assert kinds(decisions[:1]) == [("shrink", Role.PREFILL, 1)]


def test_pools_that_may_be_empty_go_when_idle_and_return_with_the_first_request() -> None:
    settings = replace(
        SETTINGS, prefill=PoolRange(least=0, most=2), decode=PoolRange(least=0, most=2)
    )
    clocked = Clocked(settings)
    gone = clocked.see(*PAIR, traffic=CALM, seconds=301)
    assert kinds(gone) == [("shrink", Role.PREFILL, 0), ("shrink", Role.DECODE, 0)]
    assert clocked.see(traffic=CALM, seconds=60) == []
    first = Traffic(
        num_arrived=1,
        prompt_tokens=10,
        output_tokens=0,
        num_waiting=1,
        waiting_tokens=10,
        num_in_flight=1,
    )
    back = clocked.see(traffic=first, seconds=1)
    assert kinds(back) == [("grow", Role.PREFILL, 1), ("grow", Role.DECODE, 1)]


def test_a_first_request_that_waits_too_long_already_brings_both_pools_back() -> None:
    settings = replace(
        SETTINGS, prefill=PoolRange(least=0, most=2), decode=PoolRange(least=0, most=2)
    )
    clocked = Clocked(settings)
    clocked.see(*PAIR, traffic=CALM, seconds=301)
    late = Traffic(
        num_arrived=1,
        prompt_tokens=10,
        output_tokens=0,
        num_waiting=1,
        waiting_tokens=10,
        num_in_flight=1,
        oldest_s=2 * SETTINGS.ttft_s,
    )
    back = clocked.see(traffic=late, seconds=1)
    assert kinds(back) == [("grow", Role.PREFILL, 1), ("grow", Role.DECODE, 1)]


def test_C15_starting_replicas_leave_before_any_that_serves() -> None:
    clocked = Clocked(replace(SETTINGS, prefill=PoolRange(least=1, most=8)))
    workers = (*PAIR, worker("prefill-1"), worker("prefill-2", is_serving=False))
    decisions = clocked.see(*workers, seconds=302)
    assert kinds(decisions) == [("shrink", Role.PREFILL, 1)]
    # Not the one that only starts stays: it goes first, and of the others the least busy.
    assert decisions[0].retired[0] == "prefill-2"


def test_C15_highest_number_leaves_first_where_kubernetes_takes_no_other() -> None:
    clocked = Clocked(replace(SETTINGS, leave_by_number=True))
    workers = (PAIR[0], worker("decode-0"), worker("decode-9"), worker("decode-10", num_running=3))
    decisions = clocked.see(*workers, seconds=302)
    assert kinds(decisions) == [("shrink", Role.DECODE, 1)]
    assert decisions[0].retired == ("decode-10", "decode-9")


def test_C15_by_number_none_that_serves_leaves_while_one_below_it_starts() -> None:
    settings = replace(SETTINGS, leave_by_number=True, decode=PoolRange(least=2, most=8))
    clocked = Clocked(settings)
    serving = (PAIR[0], worker("decode-0"), worker("decode-2"))
    restarted = worker("decode-1", is_serving=False)
    assert clocked.see(*serving, restarted, seconds=400) == []
    (decision,) = clocked.see(*serving, worker("decode-1"), seconds=2)
    assert decision.retired == ("decode-2",)


def test_least_busy_replicas_leave_first() -> None:
    clocked = Clocked()
    workers = (PAIR[0], worker("decode-0", num_running=1), worker("decode-1", num_running=3))
    decisions = clocked.see(*workers, seconds=302)
    assert decisions[0].retired == ("decode-0",)


def test_C18_registry_that_forgets_everybody_starts_and_removes_nobody() -> None:
    clocked = Clocked()
    busy = [worker(f"decode-{i}", num_running=20, used_blocks=450) for i in range(2)]
    clocked.see(PAIR[0], *busy, seconds=400)
    unheard = [replace(one, is_serving=False) for one in (PAIR[0], *busy)]
    assert clocked.see(*unheard, seconds=14) == []
    numbers = clocked.policy.numbers
    assert (numbers[Role.PREFILL].num_serving, numbers[Role.DECODE].num_serving) == (1, 2)


def test_nothing_is_decided_while_no_router_answers() -> None:
    clocked = Clocked()
    loaded = worker("prefill-0", queued_tokens=500_000)
    assert clocked.see(loaded, PAIR[1], traffic=None, seconds=600) == []


def test_counters_of_a_restarted_router_make_no_spike() -> None:
    clocked = Clocked()
    old = replace(BUSY, num_arrived=1_000_000, prompt_tokens=900_000_000)
    clocked.see(*PAIR, traffic=old, seconds=30)
    assert clocked.see(*PAIR, traffic=BUSY, seconds=30) == []


def test_pool_never_more_than_doubles_at_once() -> None:
    loaded = [worker(f"prefill-{i}", queued_tokens=10**6) for i in range(3)]
    decisions = Clocked().see(*loaded, PAIR[1])
    assert kinds(decisions) == [("grow", Role.PREFILL, 6)]


def test_pool_stays_within_its_range() -> None:
    loaded = [worker(f"prefill-{i}", queued_tokens=10**6) for i in range(8)]
    assert Clocked().see(*loaded, PAIR[1], seconds=20) == []


def test_pool_above_its_range_shrinks_to_it_at_once_and_is_not_grown() -> None:
    many = [worker(f"decode-{i}", num_running=60, used_blocks=100) for i in range(9)]
    assert kinds(Clocked().see(PAIR[0], *many)) == [("shrink", Role.DECODE, 8)]


"""100 s of work: it asks for more replicas than there are."""


def test_decode_replicas_that_prefill_grow_with_the_prompts_that_wait() -> None:
    settings = replace(SETTINGS, prefill=PoolRange(least=0, most=0))
    loaded = worker("decode-0", queued_tokens=500_000, num_running=3)
    decisions = Clocked(settings).see(loaded)
    assert kinds(decisions) == [("grow", Role.DECODE, 2)]


def test_history_keeps_each_decision_with_its_numbers() -> None:
    clocked = Clocked()
    clocked.see(worker("prefill-0", queued_tokens=500_000), PAIR[1])
    (decision,) = clocked.policy.history
    line = decision.describe()
    assert line.startswith("prefill: grow 1 -> 2: backlog; 1 serve, 0 start, need ")
    assert "backlog 500000 tokens (" in line
