"""Runs a call and writes its answer, whole or as a stream.

Stream shape: per choice the role first (chat), then output, then its end in a chunk of its own;
with include_usage one last chunk without choices; then [DONE]. An error before the first byte is an
HTTP status; after it, one error event and the end of the answer without [DONE].
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import aclosing, suppress

from starlette.types import Receive, Scope, Send

from pdserve.errors import InvalidField, PdserveError
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.active import ActiveRequest
from router.intake import Intake, Origin
from router.openai.call import Call, Outcome
from router.openai.errors import error_body, error_response, to_json
from router.openai.event_stream import DONE, EventStream
from router.openai.http_server import ABORT_KEY
from router.openai.json_parts import BlockResponse, Encoded, encode_in_turns
from router.openai.merge import merge_events
from router.openai.sampling import shown_as
from router.tenants import Tenant
from router.validation import MAX_PROMPT_LOGPROB_ENTRIES

LAST_WORD_TIMEOUT_S = 5.0
"""For the error event at the end of a stream."""
MAX_PROMPT_ENTRIES = MAX_PROMPT_LOGPROB_ENTRIES
"""What one answer tells of its prompts, over all choices: about 20 MB of JSON."""
ENTRIES_PER_TURN = 512
"""Log-probs of prompts in one event of a stream."""


class Answer:
    """The requests of one call, and what is told of them. Owns them until `cancel`."""

    def __init__(self, call: Call, model: str) -> None:
        """Starts nothing."""
        self.call = call
        self.answer_id = f"{call.shape.id_prefix}-{secrets.token_hex(16)}"
        self.actives: list[ActiveRequest] = []
        self._intake: Intake | None = None
        self._model = model
        self._created_s = int(time.time())

    async def start(self, intake: Intake, tenant: Tenant, origin: Origin) -> None:
        """Starts one request per prompt, all or none.

        Raises:
            PdserveError: one is refused; fields are named as the client named them.
        """
        call = self.call
        self._intake = intake
        try:
            for position, wire in enumerate(call.wires):
                suffix = f"-{position}" if len(call.wires) > 1 else ""
                wire.request_id = self.answer_id + suffix
                active = await intake.start(wire, tenant, options=call.options, origin=origin)
                self.actives.append(active)
                self._check_prompt_report()
        except InvalidField as error:
            self.cancel()
            name = call.prompt_names[position]
            raise shown_as(error, {**call.names, "text": name, "token_ids": name}) from error
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends what still runs."""
        if self._intake is not None:
            for active in self.actives:
                self._intake.dispatcher.cancel(active)

    def envelope(self, object_name: str, choices: object) -> dict[str, object]:
        """Returns an answer or a chunk around its list of choices."""
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self._created_s,
            "model": self._model,
            "choices": choices,
        }

    def positions_without_scores(self) -> list[int]:
        """Returns the prompts of one token: it follows nothing, and no worker speaks of it."""
        if not self.call.wires[0].sampling.HasField("prompt_logprobs"):
            return []
        requests = enumerate(active.state.request for active in self.actives)
        return [position for position, request in requests if request.num_prompt_tokens == 1]

    def _check_prompt_report(self) -> None:
        """Bounds what is told of all prompts; a prompt alone was bounded when it was checked."""
        wire = self.call.wires[0].sampling
        entries = 1 if wire.echo else 0
        if wire.HasField("prompt_logprobs"):
            entries += wire.prompt_logprobs + 1
        num_entries = self.num_prompt_tokens * entries * self.call.num_samples
        if num_entries > MAX_PROMPT_ENTRIES:
            name = "prompt_logprobs" if wire.HasField("prompt_logprobs") else "echo"
            limit = (
                f"such that prompt tokens times choices times entries, here {num_entries}, is "
                f"at most {MAX_PROMPT_ENTRIES}"
            )
            value = wire.prompt_logprobs if name == "prompt_logprobs" else wire.echo
            raise InvalidField(f"sampling.{name}", value, limit)

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(active.state.request.num_prompt_tokens for active in self.actives)


class UsageSum:
    """Adds up what the requests of one call used."""

    def __init__(self) -> None:
        """Starts at nothing."""
        self._total = types_pb2.Usage()

    def add(self, usage: types_pb2.Usage) -> None:
        """Adds one request."""
        self._total.prompt_tokens += usage.prompt_tokens
        self._total.completion_tokens += usage.completion_tokens
        self._total.cached_tokens += usage.cached_tokens

    def shown(self) -> dict[str, object]:
        """Returns the `usage` object."""
        total = self._total
        return {
            **usage_so_far(total.prompt_tokens, total.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
        }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """Returns a `usage` object without details."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


async def answer_whole(answer: Answer, receive: Receive) -> BlockResponse:
    """Waits for all output and returns it at once; a client that goes away ends it.

    Raises:
        PdserveError: a request failed.
    """
    call, shape = answer.call, answer.call.shape
    prompts: defaultdict[int, inference_pb2.PromptChunk] = defaultdict(inference_pb2.PromptChunk)
    outputs: defaultdict[int, inference_pb2.TokenChunk] = defaultdict(inference_pb2.TokenChunk)
    ends: dict[int, inference_pb2.SampleFinish] = {}
    usage = UsageSum()
    watch = _watch_client(answer, receive)
    try:
        async with aclosing(merge_events(answer.actives)) as events:
            async for position, event in events:
                first = position * call.num_samples
                if isinstance(event, inference_pb2.TokenChunk):
                    _append(outputs[first + event.index], event)
                elif isinstance(event, inference_pb2.PromptChunk):
                    prompts[position].MergeFrom(event)
                else:
                    ends.update((first + end.index, end) for end in event.samples)
                    usage.add(event.usage)
    finally:
        watch.cancel()
        answer.cancel()
    choices: list[bytes] = []
    for choice in sorted(ends):
        prompt = prompts[choice // call.num_samples]
        outcome = Outcome(prompt=prompt, output=outputs[choice], finish=ends[choice])
        choices += (b"," if choices else b"[", *await encode_in_turns(shape.whole(choice, outcome)))
    body = answer.envelope(shape.object_name, Encoded((*choices, b"]")))
    body.update(usage=usage.shown(), **shape.whole_beside(prompts[0]))
    return BlockResponse(await encode_in_turns(body))


def _append(output: inference_pb2.TokenChunk, chunk: inference_pb2.TokenChunk) -> None:
    output.token_ids.extend(chunk.token_ids)
    output.logprobs.extend(chunk.logprobs)
    output.text += chunk.text


class StreamedAnswer:
    """An ASGI response that streams an answer whose requests are started."""

    def __init__(self, answer: Answer, ping_interval_s: float) -> None:
        """Takes the answer; `__call__` ends its requests whatever happens."""
        self._answer = answer
        self._ping_interval_s = ping_interval_s
        self._usage = UsageSum()
        self._num_output = 0
        self._opened: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams to the end."""
        answer = self._answer
        watch = _watch_client(answer, receive)
        try:
            async with EventStream(send, scope[ABORT_KEY], self._ping_interval_s) as stream:
                for active in answer.actives:
                    active.buffer.interrupt_with(stream.interrupt)
                try:
                    await self._write_all(stream)
                except PdserveError as error:
                    if stream.is_started:
                        await _write_last_word(stream, error)
                    else:
                        await error_response(error)(scope, receive, send)
        finally:
            watch.cancel()
            answer.cancel()

    async def _write_all(self, stream: EventStream) -> None:
        answer = self._answer
        async with aclosing(merge_events(answer.actives)) as events:
            for position in answer.positions_without_scores():
                nothing = inference_pb2.PromptChunk(first_position=1)
                await self._write_prompt(stream, position * answer.call.num_samples, nothing)
            async for position, event in events:
                first = position * answer.call.num_samples
                if isinstance(event, inference_pb2.TokenChunk):
                    await stream.write(self._output(first + event.index, event))
                elif isinstance(event, inference_pb2.PromptChunk):
                    await self._write_prompt(stream, first, event)
                else:
                    self._usage.add(event.usage)
                    await stream.write(b"".join(self._end(first, end) for end in event.samples))
        last = b""
        if answer.call.stream_options.has_usage:
            shape = answer.call.shape
            body = {**answer.envelope(shape.chunk_object_name, []), "usage": self._usage.shown()}
            last = _event(to_json(body))
        await stream.write(last + DONE)
        await stream.close()

    async def _write_prompt(
        self, stream: EventStream, first: int, chunk: inference_pb2.PromptChunk
    ) -> None:
        shape = self._answer.call.shape
        for piece in _pieces(chunk):
            for choice in range(first, first + self._answer.call.num_samples):
                shown = shape.prompt(choice, piece)
                if shown is not None:
                    opening = self._opening(choice)
                    # By itself: a list of one is not encoded in parts.
                    choices = Encoded((b"[", *await encode_in_turns(shown), b"]"))
                    blocks = await encode_in_turns(self._body(choices, shape.beside(piece)))
                    await stream.write(opening + _event(*blocks))
                    # A long prompt comes in many pieces, and all of them may be there already.
                    await asyncio.sleep(0)

    def _output(self, choice: int, chunk: inference_pb2.TokenChunk) -> bytes:
        # The opening chunk carries none of these tokens, and so does its usage.
        opening = self._opening(choice)
        self._num_output += len(chunk.token_ids)
        return opening + self._chunk(self._answer.call.shape.delta(choice, chunk))

    def _end(self, first: int, end: inference_pb2.SampleFinish) -> bytes:
        choice = first + end.index
        return self._opening(choice) + self._chunk(self._answer.call.shape.finish(choice, end))

    def _opening(self, choice: int) -> bytes:
        if choice in self._opened:
            return b""
        self._opened.add(choice)
        opening = self._answer.call.shape.opening(choice)
        return b"" if opening is None else self._chunk(opening)

    def _chunk(self, choice: dict[str, object]) -> bytes:
        return _event(to_json(self._body([choice], {})))

    def _body(self, choices: object, beside: Mapping[str, object]) -> dict[str, object]:
        answer = self._answer
        options = answer.call.stream_options
        body = answer.envelope(answer.call.shape.chunk_object_name, choices)
        body.update(beside)
        if options.has_continuous_usage:
            body["usage"] = usage_so_far(answer.num_prompt_tokens, self._num_output)
        elif options.has_usage:
            body["usage"] = None
        return body


def _pieces(chunk: inference_pb2.PromptChunk) -> Iterator[inference_pb2.PromptChunk]:
    """Cuts log-probs of a prompt into what takes some milliseconds to show."""
    num_logprobs = len(chunk.logprobs)
    if not num_logprobs:
        yield chunk
        return
    step = max(1, ENTRIES_PER_TURN // (1 + len(chunk.logprobs[0].top)))
    for start in range(0, num_logprobs, step):
        yield inference_pb2.PromptChunk(
            first_position=chunk.first_position + start,
            logprobs=chunk.logprobs[start : start + step],
        )


def _event(*text: bytes) -> bytes:
    return b"".join((b"data: ", *text, b"\n\n"))


async def _write_last_word(stream: EventStream, error: PdserveError) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORD_TIMEOUT_S):
            await stream.write(_event(to_json(error_body(error))))
            await stream.close()
            return
    stream.reset()


def _watch_client(answer: Answer, receive: Receive) -> asyncio.Task[None]:
    async def watch() -> None:
        # The body was read: what comes next is the client's end, or the answer's.
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    return asyncio.create_task(watch(), name="client-watch")
