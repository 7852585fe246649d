"""What a runner computes before it serves: a prompt tile and a decode step."""

from pdserve.config.engine import ATTENTION_TILE_TOKENS
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId, Request, RequestId, SamplingParams


def make_warm_up_plans(room: int, block_size: int) -> tuple[StepPlan, StepPlan]:
    """Returns both steps, in order; nobody reads their KV.

    Args:
        room: tokens that a sequence may have, at least 2.
        block_size: tokens per KV block.
    """
    num_tokens = min(ATTENTION_TILE_TOKENS, room - 1)
    tokens = (0,) * (num_tokens + 1)
    request = Request(
        request_id=RequestId("warm-up"),
        token_ids=tokens[:num_tokens],
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0),
    )
    blocks = tuple(BlockId(i) for i in range(-(-(num_tokens + 1) // block_size)))

    def plan(start: int, end: int) -> StepPlan:
        part = SequenceSlice(
            request=request,
            start=start,
            token_ids=tokens[start:end],
            block_ids=blocks,
            output_index=end - num_tokens,
        )
        return StepPlan(slices=(part,))

    return plan(0, num_tokens), plan(num_tokens, num_tokens + 1)
