"""A request on a fake worker, and what is said of it on the way."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.rpc.v1 import types_pb2, worker_pb2
from tests.support.fake_script import Script
from tests.support.fake_tokens import FIRST_PLAIN_ID, next_token


@dataclass
class Held:
    """A request on a worker."""

    spec: types_pb2.RequestSpec
    decode_attempt: int
    task: asyncio.Task[None] | None = None


def samples_of(spec: types_pb2.RequestSpec) -> list[types_pb2.RequestSpec]:
    """Returns a copy for each sample, as a request of its own."""
    samples = []
    for index in range(spec.sample_index, spec.sample_index + spec.sampling.n):
        one = types_pb2.RequestSpec()
        one.CopyFrom(spec)
        if spec.sampling.n > 1:
            one.request_id = f"{spec.request_id}#{index}"
            one.sampling.n = 1
            one.sample_index = index
        samples.append(one)
    return samples


def make_update(
    held: Held, first_index: int, token_ids: Sequence[int] = ()
) -> worker_pb2.SequenceUpdate:
    update = worker_pb2.SequenceUpdate(
        request_id=held.spec.request_id,
        attempt=held.spec.attempt,
        decode_attempt=held.decode_attempt,
        first_index=first_index,
        token_ids=token_ids,
    )
    if held.spec.sampling.HasField("logprobs"):
        top = [types_pb2.TopLogprob(token_id=1, logprob=-1.0)] * held.spec.sampling.logprobs
        update.logprobs.extend(
            types_pb2.TokenLogprob(token_id=token, logprob=-float(first_index + offset), top=top)
            for offset, token in enumerate(token_ids)
        )
    return update


def tell_first_token(
    spec: types_pb2.RequestSpec, sample: types_pb2.RequestSpec, index: int
) -> worker_pb2.SequenceUpdate:
    """Returns what prefill says of a sample; the first one tells of the prompt too."""
    token = next_token(spec.token_ids, sample.sample_index)
    update = make_update(Held(sample, 0), index, [token])
    if sample.sample_index == spec.sample_index:
        times = worker_pb2.StageTimes(queue_s=0.001, prefill_s=0.01, cached_tokens=16)
        update.times.CopyFrom(times)
        _score_prompt(spec, update)
    return update


def tell_handed_off(
    spec: types_pb2.RequestSpec, sample: types_pb2.RequestSpec, index: int, decode_attempt: int
) -> worker_pb2.SequenceUpdate:
    """Returns what prefill says once decode has it; the first sample tells of the KV too."""
    update = make_update(Held(sample, 0), index)
    if sample.sample_index == spec.sample_index:
        times = worker_pb2.StageTimes(handoff_s=0.002, kv_blocks_shipped=4, kv_bytes_shipped=4096)
        update.times.CopyFrom(times)
    update.handed_off.decode_attempt = decode_attempt
    return update


def tell_refused(
    sample: types_pb2.RequestSpec, index: int, decode_attempt: int, retry_after_s: float | None
) -> worker_pb2.SequenceUpdate:
    """Returns what prefill says when decode does not take it."""
    update = make_update(Held(sample, 0), index)
    update.needs_placement.CopyFrom(
        worker_pb2.NeedsPlacement(
            detail="refused",
            decode_attempt=decode_attempt,
            hold_s=5.0,
            retry_after_s=retry_after_s,
        )
    )
    return update


def tell_scripted_end(script: Script, held: Held, index: int) -> worker_pb2.SequenceUpdate | None:
    """Returns how the script ends a request before a token; None: not here."""
    update = make_update(held, index)
    if script.return_before == index:
        script.return_before = None
        update.returned.reason = script.return_reason
        return update
    if script.fail_before == index:
        failed = worker_pb2.Failed(code=13, reason="INTERNAL", message="scripted")
        update.failed.CopyFrom(failed)
        return update
    return None


def prompt_logprob(position: int) -> float:
    """Returns what the fakes say of the prompt's token at a position."""
    return -position / 4


def _score_prompt(spec: types_pb2.RequestSpec, update: worker_pb2.SequenceUpdate) -> None:
    if not spec.sampling.HasField("prompt_logprobs"):
        return
    update.prompt_logprobs.first_position = 1
    for position in range(1, spec.num_prompt_tokens):
        update.prompt_logprobs.logprobs.add(
            token_id=spec.token_ids[position],
            logprob=prompt_logprob(position),
            top=[
                types_pb2.TopLogprob(token_id=FIRST_PLAIN_ID + rank, logprob=-rank / 8)
                for rank in range(spec.sampling.prompt_logprobs)
            ],
        )
