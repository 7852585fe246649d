"""What the samples of one request share is computed once, and told under each sample's own id."""

from collections.abc import Sequence

from pdserve.engine.batch import SequenceSlice, StepResult
from pdserve.errors import PdserveError
from pdserve.rank.outbox import Outbox
from pdserve.request import Request
from pdserve.rpc.codec import logprobs_to_wire
from pdserve.rpc.v1 import worker_pb2


def send_to_samples(
    samples: Sequence[Request], update: worker_pb2.SequenceUpdate, outbox: Outbox
) -> None:
    """Sends an update that holds for all these samples; the first one is told the times."""
    for position, one in enumerate(samples):
        copy = update
        if position:
            copy = worker_pb2.SequenceUpdate()
            copy.CopyFrom(update)
            copy.ClearField("times")
        copy.request_id = one.request_id
        copy.attempt = one.attempt
        outbox.update(one.front_id, copy)


def report_prompt_scores(
    slices: Sequence[SequenceSlice], result: StepResult, outbox: Outbox
) -> None:
    """Sends what a step says of prompts; call it before the step's tokens are sent.

    Of several samples the first one speaks for the prompt.

    Args:
        slices: those of the step that somebody still waits for.
        result: of the step.
        outbox: where it goes.
    """
    for part in slices:
        logprobs = result.prompt_logprobs.get(part.request.request_id)
        if not logprobs:
            continue
        first = part.request.sample(part.request.sample_index)
        scores = worker_pb2.PromptLogprobs(
            first_position=part.start + 1, logprobs=[logprobs_to_wire(one) for one in logprobs]
        )
        update = worker_pb2.SequenceUpdate(first_index=first.num_emitted, prompt_logprobs=scores)
        send_to_samples((first,), update, outbox)


def failed_update(error: PdserveError) -> worker_pb2.SequenceUpdate:
    """Encodes the failure of a request."""
    return worker_pb2.SequenceUpdate(
        failed=worker_pb2.Failed(code=error.grpc_code, reason=error.reason, message=str(error)),
    )
