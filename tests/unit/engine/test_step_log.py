from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.engine.step_log import MAX_SAMPLES_A_KIND, StepLog
from pdserve.predictor.predictor import DecodeSample, PrefillSample
from tests.support.scheduling import make_request


def piece(start: int, count: int, *, output_index: int | None = None) -> SequenceSlice:
    return SequenceSlice(
        request=make_request("r", 4),
        start=start,
        token_ids=tuple(range(count)),
        block_ids=(0,),
        output_index=output_index,
    )


def test_steps_of_one_kind_are_samples_and_each_is_taken_once() -> None:
    log = StepLog()
    log.note(StepPlan(slices=(piece(64, 32),)), 0.25)
    log.note(StepPlan(slices=(piece(9, 1, output_index=3), piece(19, 1, output_index=0))), 0.125)
    log.note(StepPlan(slices=(piece(9, 1, output_index=3), piece(0, 8))), 9.0)
    assert log.take() == (
        PrefillSample(num_tokens=32, num_context_tokens=64, seconds=0.25),
        DecodeSample(num_sequences=2, num_kv_tokens=30, seconds=0.125),
    )
    assert log.take() == ()


def test_only_the_latest_samples_are_kept() -> None:
    log = StepLog()
    for step in range(10):
        log.note_decode(3, 300 + 3 * step, 0.01)
    kept = log.take()
    assert len(kept) == MAX_SAMPLES_A_KIND
    assert kept[-1] == DecodeSample(num_sequences=3, num_kv_tokens=327, seconds=0.01)
