"""What a step of a decode worker made: one token for each sample."""

from dataclasses import dataclass

from pdserve.engine.batch import StepResult
from pdserve.engine.scheduler import NO_TIMES, SequenceState, SequenceTimes
from pdserve.request import (
    FinishReason,
    Request,
    RequestId,
    SampledToken,
    finish_reason_after,
)


@dataclass(kw_only=True, slots=True)
class DecodeProgress:
    """One token that a step made. Never changed; not frozen for the reason of `SequenceSlice`."""

    request_id: RequestId
    attempt: int
    token: SampledToken
    output_index: int
    finish_reason: FinishReason | None
    """Set with the last token; the blocks are freed by then."""
    num_cached_tokens: int
    """Tokens of the request whose KV came from the prefix cache."""
    num_computed_here: int
    """Tokens of the request that this worker computed itself."""
    has_lost_handoff: bool
    """They should have been handed off."""
    times: SequenceTimes
    """Of a sequence that was prefilled here; all None for a handed-off one."""


def make_progress(
    sequence: SequenceState, output_index: int, result: StepResult
) -> tuple[DecodeProgress, ...]:
    """Returns the next token of each sample that a sequence stands for.

    Of several samples the first one speaks for the prompt that they share: it has the times.
    """
    request = sequence.request
    return tuple(
        make_sample_progress(
            sequence,
            one,
            output_index,
            result.sampled[one.request_id],
            sequence.times if one.sample_index == request.sample_index else NO_TIMES,
        )
        for one in request.samples()
    )


def make_sample_progress(
    sequence: SequenceState,
    sample: Request,
    output_index: int,
    token: SampledToken,
    times: SequenceTimes,
) -> DecodeProgress:
    """Returns the next token of one sample that a sequence stands for."""
    return DecodeProgress(
        request_id=sample.request_id,
        attempt=sample.attempt,
        token=token,
        output_index=output_index,
        finish_reason=finish_reason_after(sample, output_index + 1, token.token_id),
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_here=sequence.num_computed_here,
        has_lost_handoff=sequence.has_lost_handoff,
        times=times,
    )
