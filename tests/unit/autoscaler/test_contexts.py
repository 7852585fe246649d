"""How much KV a sequence has."""

from dataclasses import replace

from autoscaler.contexts import ContextMeter
from pdserve.predictor.predictor import DecodeSample, PrefillSample
from tests.unit.autoscaler.clocked_policy import worker

STEPS = (
    PrefillSample(num_tokens=500, num_context_tokens=0, seconds=0.1),
    DecodeSample(num_sequences=4, num_kv_tokens=4000, seconds=0.01),
    DecodeSample(num_sequences=6, num_kv_tokens=12_000, seconds=0.01),
)
BUSY = worker("decode-0", num_running=5, used_blocks=1000, reserved_blocks=500, samples=STEPS)


def test_steps_say_how_long_sequences_are_whatever_blocks_hold() -> None:
    meter = ContextMeter(60.0)
    meter.note(1.0, [BUSY])
    assert meter.tokens_of_each(30.0) == 1600.0


def test_without_steps_blocks_say_it_but_not_those_that_are_only_reserved() -> None:
    meter = ContextMeter(60.0)
    meter.note(1.0, [replace(BUSY, samples=())])
    assert meter.tokens_of_each(30.0) == 500 * 16 / 5


def test_figures_without_a_new_report_do_not_outweigh_those_with_one() -> None:
    meter = ContextMeter(60.0)
    meter.note(1.0, [BUSY])
    for second in range(2, 20):
        meter.note(float(second), [replace(BUSY, samples=())])
    assert meter.tokens_of_each(30.0) == 1600.0


def test_nothing_is_said_while_nothing_ran() -> None:
    meter = ContextMeter(60.0)
    meter.note(1.0, [worker("decode-0", used_blocks=3)])
    assert meter.tokens_of_each(30.0) == 0.0
