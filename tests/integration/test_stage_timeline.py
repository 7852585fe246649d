"""Stages of a pipeline on a CPU compute different steps at the same time, in real processes."""

from pathlib import Path

import pytest

from tests.support.stage_timeline import NUM_STEPS, Span, play
from tests.support.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(
        tmp_path_factory.mktemp("timeline") / "model",
        hidden=256,
        heads=4,
        kv_heads=2,
        intermediate=1024,
        num_layers=6,
    )


def num_overlapping(spans: list[Span], stage: int) -> int:
    """Counts the steps of the stage behind during which a stage computed a later one."""
    here = [span for span in spans if span.stage == stage]
    behind = [span for span in spans if span.stage == stage + 1]
    return sum(
        any(later.step > earlier.step and later.overlaps(earlier) for later in here)
        for earlier in behind
    )


@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_stages_compute_different_steps_at_the_same_time(
    model: Path, tmp_path: Path, num_stages: int
) -> None:
    spans = play(model, num_stages, tmp_path / "meeting", max_in_flight=num_stages)
    assert len(spans) == num_stages * NUM_STEPS
    for stage in range(num_stages - 1):
        # Of twelve: how many depends on the cores that are free. It was none when each step's
        # logits were waited for.
        assert num_overlapping(spans, stage) >= 1, spans


def test_with_one_step_in_flight_stages_take_turns(model: Path, tmp_path: Path) -> None:
    spans = play(model, 2, tmp_path / "meeting", max_in_flight=1)
    assert num_overlapping(spans, 0) == 0
