"""Stages of a pipeline on a CPU compute different steps at the same time, in real processes."""

from pathlib import Path

import pytest

from tests.support.stage_timeline import NUM_STEPS, play
from tests.support.tiny_models import make_tiny_llama


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stage_computes_a_later_step_while_the_next_stage_is_at_an_earlier_one(
    tmp_path: Path, num_stages: int
) -> None:
    model = make_tiny_llama(
        tmp_path / "model", hidden=256, heads=4, kv_heads=2, intermediate=1024, num_layers=6
    )
    (tmp_path / "meeting").mkdir()
    spans = play(model, num_stages, tmp_path / "meeting")
    assert len(spans) == num_stages * NUM_STEPS
    for stage in range(num_stages - 1):
        here = [span for span in spans if span.stage == stage]
        behind = [span for span in spans if span.stage == stage + 1]
        overlapping = [
            earlier
            for earlier in behind
            if any(later.step > earlier.step and later.overlaps(earlier) for later in here)
        ]
        # The last steps have none behind them.
        assert len(overlapping) >= NUM_STEPS // 2, spans
        assert all(behind[step].began_s >= here[step].began_s for step in range(NUM_STEPS)), (
            "a step was computed before the stage ahead had it"
        )
