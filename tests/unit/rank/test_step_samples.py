"""Samples say what they claim: pure steps only, timed from launch or from the step before."""

from collections import deque

import pytest

from pdserve.engine.batch import PendingStep, SequenceSlice, StepPlan
from pdserve.engine.step_log import MAX_SAMPLES_A_KIND
from pdserve.predictor.predictor import MIN_SAMPLES, NUM_WARM_UP_SAMPLES, Predictor
from pdserve.rank.step_samples import SampledRunner, StepSamples
from pdserve.request import Incarnation
from pdserve.rpc.v1 import types_pb2
from pdserve.timeline import ManualClock
from router.sample_intake import observe_samples
from tests.support.scheduling import make_request


def _slice(start: int, count: int, *, output_index: int | None = 0) -> SequenceSlice:
    return SequenceSlice(
        request=make_request("r", 4),
        start=start,
        token_ids=tuple(range(count)),
        block_ids=(0,),
        output_index=output_index,
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def samples(clock: ManualClock) -> StepSamples:
    return StepSamples(clock)


def _report(samples: StepSamples) -> types_pb2.WorkerLoad:
    load = types_pb2.WorkerLoad()
    samples.report_into(load, deque([(4096, 0.5)]))
    return load


def test_a_pure_step_is_a_sample_of_its_kind(samples: StepSamples, clock: ManualClock) -> None:
    for plan, seconds in [
        (StepPlan(slices=(_slice(64, 32, output_index=None),)), 0.25),
        (StepPlan(slices=(_slice(9, 1), _slice(19, 1))), 0.125),
    ]:
        samples.note_launch()
        clock.advance(seconds)
        samples.note_end(plan)
    prefill, decode, transfer = _report(samples).samples
    assert (prefill.prefill.num_tokens, prefill.prefill.num_context_tokens) == (32, 64)
    assert prefill.seconds == 0.25
    assert (decode.decode.num_sequences, decode.decode.num_kv_tokens) == (2, 30)
    assert decode.seconds == 0.125
    assert (transfer.transfer.num_bytes, transfer.seconds) == (4096, 0.5)
    assert [len(_report(samples).samples) for _ in range(2)] == [1, 1]


def test_a_step_of_several_prompts_or_of_both_kinds_is_none(samples: StepSamples) -> None:
    for plan in (
        StepPlan(slices=(_slice(0, 8), _slice(0, 8))),
        StepPlan(slices=(_slice(9, 1), _slice(0, 8))),
    ):
        samples.note_launch()
        samples.note_end(plan)
    assert len(_report(samples).samples) == 1


def test_a_step_behind_another_is_timed_from_the_end_of_that(
    samples: StepSamples, clock: ManualClock
) -> None:
    plan = StepPlan(slices=(_slice(9, 1),))
    samples.note_launch()
    clock.advance(1.0)
    samples.note_launch()
    clock.advance(1.0)
    samples.note_end(plan)
    clock.advance(3.0)
    samples.note_end(plan)
    assert [one.seconds for one in _report(samples).samples][:2] == [2.0, 3.0]


def test_a_step_that_computes_at_launch_is_timed_whole(
    samples: StepSamples, clock: ManualClock
) -> None:
    class Runner:
        max_steps_in_flight = 1

        def launch(self, plan: StepPlan) -> PendingStep | None:
            clock.advance(0.5)
            return None

    plan = StepPlan(slices=(_slice(9, 1),))
    SampledRunner(Runner(), samples).launch(plan)
    samples.note_end(plan)
    assert _report(samples).samples[0].seconds == 0.5


def test_a_report_is_bounded_and_numbered(samples: StepSamples) -> None:
    for _ in range(100):
        samples.note_launch()
        samples.note_end(StepPlan(slices=(_slice(9, 1),)))
    first, second = _report(samples), _report(samples)
    assert len(first.samples) == MAX_SAMPLES_A_KIND + 1
    assert (first.report, second.report) == (1, 2)


def test_the_predictor_learns_from_reports() -> None:
    predictor = Predictor()
    for number in range(NUM_WARM_UP_SAMPLES + MIN_SAMPLES):
        tokens = 16 * (number + 1)
        step = types_pb2.PrefillStep(num_tokens=tokens)
        sample = types_pb2.StepSample(seconds=0.001 * tokens, prefill=step)
        observe_samples(predictor, "c", Incarnation(1), [sample, types_pb2.StepSample(seconds=1)])
    assert predictor.prefill_s("c", 1000) == pytest.approx(1.0, rel=0.01)
