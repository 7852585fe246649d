"""From what replicas report to targets: one law for each class of workers."""

import threading
from dataclasses import replace

import pytest

from autoscaler.controller import Controller
from autoscaler.figures import Reading, Traffic, WorkerFigures
from autoscaler.need import predict_prompt_s
from autoscaler.sample_feed import SampleFeed
from autoscaler.settings import PoolRange, ScalingSettings
from pdserve.predictor.predictor import (
    NUM_WARM_UP_SAMPLES,
    DecodeSample,
    Predictor,
    PrefillSample,
    Sample,
)
from pdserve.request import Incarnation, Role
from pdserve.timeline import ManualClock
from tests.unit.autoscaler.clocked_policy import PROFILE
from tests.unit.autoscaler.test_need import PROMPTS

COLD = PrefillSample(num_tokens=100, num_context_tokens=0, seconds=9.0)


def prompt(num_tokens: int, each_s: float) -> Sample:
    return PrefillSample(
        num_tokens=num_tokens, num_context_tokens=0, seconds=0.001 + num_tokens * each_s
    )


def reporter(number: int, *samples: Sample, life: int = 1, name: str = "gpu") -> WorkerFigures:
    return WorkerFigures(
        worker_id="prefill-0",
        role=Role.PREFILL,
        is_serving=True,
        worker_class=name,
        life=Incarnation(life),
        report=number,
        samples=samples,
    )


def feed_prompts(feed: SampleFeed, each_s: float, *, name: str = "gpu", life: int = 1) -> None:
    for number in range(1, 41):
        feed.take([reporter(number, prompt(10 + number * 20, each_s), name=name, life=life)])


def test_each_class_of_workers_gets_a_law_of_its_own() -> None:
    predictor = Predictor()
    feed = SampleFeed(predictor)
    feed_prompts(feed, 0.001, name="fast")
    feed_prompts(feed, 0.004, name="slow", life=2)
    assert predictor.prefill_s("fast", 1000) == pytest.approx(1.0, rel=0.05)
    assert predictor.prefill_s("slow", 1000) == pytest.approx(4.0, rel=0.05)


def test_report_that_is_shown_again_is_not_counted_again() -> None:
    predictor = Predictor()
    feed = SampleFeed(predictor)
    for _ in range(100):
        feed.take([reporter(1, *[prompt(100, 0.001)] * 8)])
    (quality,) = predictor.qualities()
    assert quality.num_samples == 8 - NUM_WARM_UP_SAMPLES


def test_report_is_not_new_because_its_worker_was_unheard_for_a_moment() -> None:
    predictor = Predictor()
    feed = SampleFeed(predictor)
    shown = reporter(1, *[prompt(100, 0.001)] * 8)
    for one in (shown, replace(shown, life=None, samples=()), shown):
        feed.take([one])
    assert predictor.qualities()[0].num_samples == 8 - NUM_WARM_UP_SAMPLES


def test_figures_that_are_not_a_workers_own_report_are_none_that_was_seen() -> None:
    predictor = Predictor()
    feed = SampleFeed(predictor)
    shown = reporter(1, *[prompt(100, 0.001)] * 8)
    # From a router's memory, while the worker did not answer.
    for one in (shown, replace(shown, report=0, samples=()), shown):
        feed.take([one])
    assert predictor.qualities()[0].num_samples == 8 - NUM_WARM_UP_SAMPLES


def test_C16_first_samples_of_each_life_say_nothing() -> None:
    predictor = Predictor()
    feed = SampleFeed(predictor)
    feed_prompts(feed, 0.001)
    for life in range(2, 30):
        feed.take([reporter(1, *[COLD] * NUM_WARM_UP_SAMPLES, life=life)])
    assert predictor.prefill_s("gpu", 1000) == pytest.approx(1.0, rel=0.05)


def test_prompt_of_several_steps_pays_the_fixed_cost_of_each() -> None:
    load = replace(
        PROMPTS, requests_per_s=1.0, tokens_per_s=1000.0, busy_replicas=0.0, chunk_tokens=256
    )
    predictor = Predictor([PROFILE])
    assert predict_prompt_s(load, 1000, predictor) == pytest.approx(4 * 0.01 + 0.2, rel=0.01)
    whole = replace(load, chunk_tokens=2000)
    assert predict_prompt_s(whole, 1000, predictor) == pytest.approx(0.01 + 0.2, rel=0.01)


class Fleet:
    """One replica of each pool that says how long its steps take, and what it is asked to be."""

    def __init__(self, each_s: float) -> None:
        self.each_s = each_s
        self.num_reports = 0
        self.sizes: dict[Role, int] = {}

    def read(self) -> Reading:
        self.num_reports += 1
        tokens = 100 + self.num_reports * 37 % 400
        steps: dict[Role, Sample] = {
            Role.PREFILL: prompt(tokens, self.each_s),
            Role.DECODE: DecodeSample(
                num_sequences=1 + self.num_reports % 8, num_kv_tokens=tokens, seconds=0.01
            ),
        }
        workers = tuple(
            replace(
                reporter(self.num_reports, steps[role], life=number),
                worker_id=f"{role}-0",
                role=role,
            )
            for number, role in enumerate(Role)
        )
        # Two prompts of 500 tokens come each second.
        traffic = Traffic(
            num_arrived=2 * self.num_reports,
            prompt_tokens=1000 * self.num_reports,
            output_tokens=0,
            num_in_flight=2,
        )
        return Reading(workers=workers, traffic=traffic)

    def scale(self, role: Role, num_replicas: int) -> None:
        self.sizes[role] = num_replicas

    def drain(self, worker_id: str) -> None:
        raise AssertionError(worker_id)

    def flip(self, worker_id: str, role: Role) -> None:
        raise AssertionError(worker_id)


def run_fleet(each_s: float) -> tuple[Fleet, Controller, list[str]]:
    fleet, clock, lines = Fleet(each_s), ManualClock(), list[str]()
    bounds = PoolRange(least=1, most=8)
    controller = Controller(
        ScalingSettings(prefill=bounds, decode=bounds, ttft_s=2.0),
        fleet,
        fleet,
        clock,
        predictor=Predictor(),
        report=lines.append,
    )
    for _ in range(45):
        clock.advance(1.0)
        controller.tick()
    return fleet, controller, lines


def test_targets_come_from_what_replicas_report() -> None:
    # 0.25 s of prefill a second fit one replica; 1 s a second need two at 80 %.
    assert run_fleet(0.00025)[0].sizes == {}
    assert run_fleet(0.001)[0].sizes == {Role.PREFILL: 2}


def test_decisions_say_what_was_predicted_and_from_how_much() -> None:
    _, controller, lines = run_fleet(0.001)
    numbers = controller.numbers[Role.PREFILL]
    assert numbers.fit is not None
    assert numbers.fit.num_samples == 45 - NUM_WARM_UP_SAMPLES
    assert numbers.predicted_s == pytest.approx(0.5, rel=0.02)
    grown = next(line for line in lines if line.startswith("prefill: grow 1 -> 2: arrivals"))
    assert "prompt 501 ms predicted (" in grown
    assert " samples, error 0%)" in grown


def test_samples_of_a_round_that_an_order_overtook_are_not_lost() -> None:
    class Moving(Fleet):
        def read(self) -> Reading:
            # Between this look and the decision somebody flips a replica.
            reading = super().read()
            if self.num_reports > 1:
                controller.flip("decode-0", Role.PREFILL)
            return reading

        def flip(self, worker_id: str, role: Role) -> None:
            self.sizes[role] = self.sizes.get(role, 1)

    fleet, clock, predictor = Moving(0.001), ManualClock(), Predictor()
    bounds = PoolRange(least=1, most=8)
    controller = Controller(
        ScalingSettings(prefill=bounds, decode=bounds), fleet, fleet, clock, predictor=predictor
    )
    for _ in range(20):
        clock.advance(1.0)
        assert controller.tick() == ()
    assert {one.num_samples for one in predictor.qualities()} == {20 - NUM_WARM_UP_SAMPLES}


def test_controller_stops_when_it_is_told_to() -> None:
    fleet, controller, _ = run_fleet(0.001)
    stopped = threading.Event()
    stopped.set()
    before = fleet.num_reports
    controller.run(stopped)
    assert fleet.num_reports == before
