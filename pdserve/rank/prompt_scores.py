"""Tells the router the log-probabilities of prompts, as each chunk is computed."""

from pdserve.engine.batch import StepPlan, StepResult
from pdserve.rank.outbox import Outbox
from pdserve.rpc.codec import logprobs_to_wire
from pdserve.rpc.v1 import worker_pb2


def report_prompt_scores(plan: StepPlan, result: StepResult, outbox: Outbox) -> None:
    """Sends what a step says of prompts; call it before the step's tokens are sent.

    Of several samples the first one speaks for the prompt that they share.
    """
    for part in plan.slices:
        logprobs = result.prompt_logprobs.get(part.request.request_id)
        if not logprobs:
            continue
        first = part.request.sample(part.request.sample_index)
        scores = worker_pb2.PromptLogprobs(
            first_position=part.start + 1, logprobs=[logprobs_to_wire(one) for one in logprobs]
        )
        update = worker_pb2.SequenceUpdate(
            request_id=first.request_id,
            attempt=first.attempt,
            first_index=first.num_emitted,
            prompt_logprobs=scores,
        )
        outbox.update(first.front_id, update)
