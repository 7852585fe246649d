"""What a step of a decode worker made: one token for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.batch import StepResult
from pdserve.engine.scheduler import SequenceState, SequenceTimes
from pdserve.request import FinishReason, RequestId, SampledToken, finish_reason_after

NO_TIMES = SequenceTimes(queue_s=None, prefill_s=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeProgress:
    """One token that a step made."""

    request_id: RequestId
    attempt: int
    sample_index: int
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
    progress = []
    for one in request.samples():
        token = result.sampled[one.request_id]
        is_speaker = one.sample_index == request.sample_index
        progress.append(
            DecodeProgress(
                request_id=one.request_id,
                attempt=one.attempt,
                sample_index=one.sample_index,
                token=token,
                output_index=output_index,
                finish_reason=finish_reason_after(one, output_index + 1, token.token_id),
                num_cached_tokens=sequence.num_cached_tokens,
                num_computed_here=sequence.num_computed_here,
                has_lost_handoff=sequence.has_lost_handoff,
                times=sequence.times if is_speaker else NO_TIMES,
            )
        )
    return tuple(progress)


def next_tokens(progress: Sequence[DecodeProgress]) -> dict[int, int]:
    """Returns, by sample index, the tokens of the samples that go on."""
    return {
        entry.sample_index: entry.token.token_id
        for entry in progress
        if entry.finish_reason is None
    }
