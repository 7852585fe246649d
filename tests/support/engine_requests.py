"""Requests as an engine gets them."""

from pdserve.request import FrontId, HandoffId, Request, RequestId, SamplingParams


def make_request(
    name: str,
    token_ids: tuple[int, ...],
    *,
    num_prompt_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    attempt: int = 1,
    eos_token_ids: tuple[int, ...] = (),
    is_priority: bool = False,
    sample_index: int = 0,
) -> Request:
    """Makes a request with a hand-off id of its own."""
    return Request(
        request_id=RequestId(name),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=16),
        front_id=FrontId("front"),
        handoff_id=HandoffId(f"handoff-{name}"),
        attempt=attempt,
        eos_token_ids=eos_token_ids,
        is_priority=is_priority,
        sample_index=sample_index,
    )
