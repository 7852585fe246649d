"""Draws tokens of a slice from its logits on the host."""

from torch import Tensor

from pdserve.engine.batch import SequenceSlice
from pdserve.request import RequestId, SampledToken
from pdserve.sampler import SamplingRow, sample


def sample_slice(part: SequenceSlice, logits_V: Tensor) -> dict[RequestId, SampledToken]:  # noqa: N803
    """Draws the next token once for each sample that the slice's request is for.

    Args:
        part: samples.
        logits_V: float32 [vocab_size], of its last token, on the host.
    """
    assert part.output_index is not None
    request = part.request
    prompt_ids: tuple[int, ...] = ()
    if request.sampling.repetition_penalty != 1:
        prompt_ids = request.token_ids[: request.num_prompt_tokens]
    sampled = {}
    for one in request.samples():
        row = SamplingRow(
            params=one.sampling,
            output_index=part.output_index,
            stop_ids=one.stop_ids,
            sample_index=one.sample_index,
            prompt_ids=prompt_ids,
            output_ids=part.output_ids,
        )
        sampled[one.request_id] = sample(logits_V, row)
    return sampled
