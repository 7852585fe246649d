"""Turns a step plan into the message that rank 0 sends to the other ranks, and back."""

from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId, Request, RequestId, SamplingParams
from pdserve.rpc.v1 import rank_pb2


def plan_to_wire(plan: StepPlan) -> rank_pb2.StepWork:
    """Encodes what computing takes: no sampling, which is rank 0's alone."""
    return rank_pb2.StepWork(
        slices=[
            rank_pb2.SliceWork(
                request_id=part.request.request_id,
                start=part.start,
                token_ids=part.token_ids,
                block_ids=part.block_ids,
                num_prompt_tokens=part.request.num_prompt_tokens,
                output_index=part.output_index,
                prompt_targets=part.prompt_targets,
            )
            for part in plan.slices
        ],
        copies=[rank_pb2.BlockCopy(source=source, target=target) for source, target in plan.copies],
    )


def plan_from_wire(wire: rank_pb2.StepWork) -> StepPlan:
    """Decodes a plan; its requests know no more of themselves than computing takes."""
    return StepPlan(
        slices=tuple(_slice_from_wire(part) for part in wire.slices),
        copies=tuple((BlockId(copy.source), BlockId(copy.target)) for copy in wire.copies),
    )


def _slice_from_wire(wire: rank_pb2.SliceWork) -> SequenceSlice:
    request = Request(
        request_id=RequestId(wire.request_id),
        token_ids=(),
        num_prompt_tokens=wire.num_prompt_tokens,
        sampling=SamplingParams(),
    )
    return SequenceSlice(
        request=request,
        start=wire.start,
        token_ids=tuple(wire.token_ids),
        block_ids=tuple(BlockId(block) for block in wire.block_ids),
        output_index=wire.output_index if wire.HasField("output_index") else None,
        prompt_targets=tuple(wire.prompt_targets),
    )
