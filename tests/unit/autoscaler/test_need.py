"""How many replicas a load needs, one figure after another."""

from dataclasses import replace

import pytest

from autoscaler.need import DecodeLoad, Flow, Need, PrefillLoad, decode_need, prefill_need
from autoscaler.settings import ScalingSettings
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from tests.unit.autoscaler.clocked_policy import PROFILE

SETTINGS = ScalingSettings(tpot_s=0.05)
ENDLESS = Flow(per_s=38.0, comes_per_s=38.0, num_prompts=1e6)
"""Of 100 tokens each: 3800 tokens a second."""
LOAD = DecodeLoad(
    worker_class=PROFILE.worker_class,
    num_sequences=0.0,
    mean_sequences=0.0,
    num_running=0.0,
    used_tokens=0.0,
    tokens_per_replica=16_000.0,
    max_num_seqs=64,
    measured_tpot_s=None,
    num_serving=1,
    tokens_of_each=0.0,
    tokens_per_request=100.0,
    flow=ENDLESS,
)
FAST = replace(PROFILE, decode=(0.002, 0.0001, 0.0))
"""64 sequences, as many as there are slots, make a step of 8.4 ms: 7619 tokens a second."""


def need_of(load: DecodeLoad, *profiles: Profile) -> Need:
    return decode_need(load, SETTINGS, Predictor(profiles))


def test_where_steps_take_as_long_as_they_may_each_replica_makes_a_batch_a_target() -> None:
    # 50 sequences take 50 ms: 1000 tokens a second.
    need = need_of(LOAD, PROFILE)
    assert need.foreseen == 4
    assert need.tokens_per_s == pytest.approx(1000.0, rel=0.01)


def test_where_slots_end_a_batch_its_steps_take_less_than_the_target() -> None:
    need = need_of(LOAD, FAST)
    assert need.tokens_per_s == pytest.approx(7619.0, rel=0.01)
    # At 50 ms a step, 3800 tokens a second would be 190 sequences, and three replicas.
    assert need.foreseen == 1


def test_where_room_ends_a_batch_it_is_smaller_and_its_steps_are_shorter() -> None:
    # Each sequence has 1280 tokens, and 80 % of the room holds 10 of them: 3.3 tokens a ms.
    need = need_of(replace(LOAD, tokens_of_each=1280.0), FAST)
    assert need.tokens_per_s == pytest.approx(10 / 0.003, rel=0.01)
    assert need.foreseen == 2


def test_a_few_prompts_that_wait_are_no_more_sequences_than_they_are() -> None:
    # They would be sent in a second, and then there are no more of them.
    few = Flow(per_s=38.0, comes_per_s=1.0, num_prompts=30.0)
    assert need_of(replace(LOAD, flow=few), PROFILE).foreseen == 1
    many = Flow(per_s=38.0, comes_per_s=1.0, num_prompts=300.0)
    assert need_of(replace(LOAD, flow=many), PROFILE).foreseen == 4


def test_while_nobody_knows_how_long_steps_take_they_are_taken_to_be_just_on_target() -> None:
    # 64 slots at 50 ms: 1280 tokens a second.
    need = need_of(LOAD)
    assert need.tokens_per_s == pytest.approx(1280.0)
    assert need.foreseen == 3


def test_nothing_is_foreseen_while_prefill_keeps_up() -> None:
    assert need_of(replace(LOAD, flow=None), PROFILE).replicas == 0


def test_room_that_is_reserved_for_one_prompt_is_not_what_each_sequence_takes() -> None:
    # One runs with 500 tokens; 9000 more are reserved for eight that prefill still computes.
    load = replace(
        LOAD,
        flow=None,
        num_sequences=9.0,
        num_running=1.0,
        used_tokens=9500.0,
        tokens_of_each=500.0,
    )
    assert need_of(load, PROFILE).replicas == 1
    assert need_of(replace(load, used_tokens=14_000.0), PROFILE).why == "KV"


PROMPTS = PrefillLoad(
    worker_class=PROFILE.worker_class,
    requests_per_s=4.0,
    tokens_per_s=4000.0,
    backlog_tokens=0,
    num_prompts=0,
    oldest_s=0.0,
    num_serving=1,
    busy_replicas=1.0,
    measured_tokens_per_s=None,
    start_s=20.0,
)
"""Of 0.21 s each."""
LAW = Predictor([replace(PROFILE, prefill=(0.01, 0.0002, 1e-7))])
"""A mean prompt takes 0.26 s, one of five times the length 2.26 s."""


def test_prompts_that_vary_take_longer_on_the_mean_than_a_mean_prompt_does() -> None:
    same = prefill_need(PROMPTS, SETTINGS, LAW)
    # Squares of the lengths are five times as large on the mean: 0.01 + 0.2 + 0.05 * 5.
    varied = prefill_need(replace(PROMPTS, variability=4.0), SETTINGS, LAW)
    assert same.service_s == pytest.approx(0.26, rel=0.01)
    assert varied.service_s == pytest.approx(0.46, rel=0.01)
    assert varied.replicas > same.replicas


def test_prompts_that_vary_wait_longer_for_each_other_although_they_take_as_long() -> None:
    linear = Predictor([PROFILE])
    same = prefill_need(PROMPTS, SETTINGS, linear)
    varied = prefill_need(replace(PROMPTS, variability=8.0), SETTINGS, linear)
    assert varied.service_s == pytest.approx(same.service_s)
    assert (same.replicas, varied.replicas) == (2, 3)


def test_replicas_that_are_seen_to_take_longer_than_predicted_are_believed() -> None:
    slow = replace(PROMPTS, measured_tokens_per_s=2000.0)
    assert prefill_need(slow, SETTINGS, LAW).service_s == pytest.approx(0.5)
    quick = replace(PROMPTS, measured_tokens_per_s=50_000.0)
    assert prefill_need(quick, SETTINGS, LAW).service_s == pytest.approx(0.26, rel=0.01)


def test_those_that_would_stay_have_larger_batches_and_so_more_sequences_at_once() -> None:
    # Two make 800 tokens a second with 21 sequences; one alone would have 41, and more by chance.
    load = replace(
        LOAD,
        flow=None,
        num_sequences=21.0,
        mean_sequences=21.0,
        num_running=21.0,
        num_serving=2,
        made_tokens_per_s=800.0,
    )
    predictor = Predictor([PROFILE])
    assert decode_need(load, SETTINGS, predictor).replicas == 1
    assert decode_need(load, SETTINGS, predictor, margin=0.15).replicas == 2
    calm = replace(load, made_tokens_per_s=400.0, mean_sequences=9.0)
    assert decode_need(calm, SETTINGS, predictor, margin=0.15).replicas == 1


def test_no_more_replicas_are_kept_than_there_are_for_what_they_make_already() -> None:
    # Faster than the law says that two could be.
    one = replace(LOAD, flow=None, num_sequences=1.0, mean_sequences=1.0, num_running=1.0)
    load = replace(one, num_serving=2, made_tokens_per_s=1e6)
    assert decode_need(load, SETTINGS, Predictor([PROFILE]), margin=0.15).replicas == 2
