"""Predictions of steps and transfers."""

from dataclasses import replace

import pytest

from pdserve.predictor.predictor import (
    MIN_SAMPLES,
    NUM_WARM_UP_SAMPLES,
    DecodeSample,
    Predictor,
    PrefillSample,
    TransferSample,
)
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation

PROFILE = Profile(
    worker_class="h200/llama-8b",
    prefill=(0.002, 2.1e-5, 2.3e-10),
    decode=(0.0037, 1.2e-5, 2.9e-8),
    transfer=(0.0002, 3.0e-12),
    kv_bytes_per_token=131072,
    kv_tokens=800_000,
)
LIFE = Incarnation(7)


def prefill(tokens: int, seconds: float) -> PrefillSample:
    return PrefillSample(num_tokens=tokens, num_context_tokens=0, seconds=seconds)


def test_nothing_is_predicted_for_a_class_that_was_never_seen() -> None:
    predictor = Predictor()
    assert predictor.prefill_s("x", 100) is None
    assert predictor.decode_step_s("x", 1, 100) is None
    assert predictor.transfer_s("x", 1) is None


def test_a_profile_is_what_is_predicted_before_anything_was_seen() -> None:
    predictor = Predictor([PROFILE])
    for tokens, context in ((128, 0), (2048, 0), (8192, 4096)):
        assert predictor.prefill_s(PROFILE.worker_class, tokens, context) == pytest.approx(
            PROFILE.prefill_s(tokens, context), rel=1e-3
        )
    assert predictor.decode_step_s(PROFILE.worker_class, 64, 64 * 600) == pytest.approx(
        PROFILE.decode_step_s(64, 64 * 600), rel=1e-3
    )
    assert predictor.transfer_s(PROFILE.worker_class, 1e9) == pytest.approx(0.0032, rel=1e-3)


def test_real_steps_overrule_a_profile_that_is_wrong() -> None:
    predictor = Predictor([PROFILE])
    for step in range(600):
        tokens = 128 * (1 + step % 16)
        seconds = 2 * PROFILE.prefill_s(tokens, 0)
        predictor.observe(PROFILE.worker_class, LIFE, prefill(tokens, seconds))
    assert predictor.prefill_s(PROFILE.worker_class, 1024) == pytest.approx(
        2 * PROFILE.prefill_s(1024, 0), rel=0.1
    )


def test_C16_the_first_samples_of_each_life_are_dropped() -> None:
    predictor = Predictor()
    for life in range(40):
        for _ in range(NUM_WARM_UP_SAMPLES):
            predictor.observe("x", Incarnation(life), prefill(100, 30.0))
    assert predictor.prefill_s("x", 100) is None
    for _ in range(MIN_SAMPLES):
        predictor.observe("x", Incarnation(1), prefill(100, 0.1))
    assert predictor.prefill_s("x", 100) == pytest.approx(0.1)


def test_kinds_and_classes_are_fitted_apart() -> None:
    predictor = Predictor()
    for _ in range(MIN_SAMPLES + NUM_WARM_UP_SAMPLES):
        predictor.observe("a", LIFE, prefill(100, 0.1))
        predictor.observe("b", LIFE, DecodeSample(num_sequences=4, num_kv_tokens=400, seconds=0.02))
        predictor.observe("gloo", LIFE, TransferSample(num_bytes=1000, seconds=0.5))
    assert predictor.prefill_s("a", 100) == pytest.approx(0.1)
    assert predictor.prefill_s("b", 100) is None
    assert predictor.decode_step_s("b", 4, 400) == pytest.approx(0.02)
    assert predictor.transfer_s("gloo", 1000) == pytest.approx(0.5)


def test_a_sample_without_duration_is_ignored() -> None:
    predictor = Predictor()
    for _ in range(50):
        predictor.observe("a", LIFE, prefill(100, 0.0))
    assert predictor.prefill_s("a", 100) is None


def test_the_quality_of_each_law_can_be_published() -> None:
    predictor = Predictor([PROFILE])
    kinds = [(one.worker_class, one.kind) for one in predictor.qualities()]
    assert kinds == [(PROFILE.worker_class, kind) for kind in ("decode", "prefill", "transfer")]
    assert all(one.num_samples > 0 and one.mean_error < 0.01 for one in predictor.qualities())


def test_a_law_of_a_profile_may_be_that_it_takes_no_time() -> None:
    predictor = Predictor([replace(PROFILE, transfer=(0.0, 0.0))])
    seconds = predictor.transfer_s(PROFILE.worker_class, 1e9)
    assert seconds is not None
    assert 0.0 <= seconds < 1e-6
