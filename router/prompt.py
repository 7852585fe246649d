"""From what a client sends to checked token ids."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.chat_template import ChatTemplate, Message
from pdserve.detokenizer import TokenTable, detokenize
from pdserve.errors import InvalidField
from pdserve.request import FrontId, HandoffId, Request, RequestId
from pdserve.rpc.v1 import inference_pb2
from pdserve.tokenizer import Tokenizer
from pdserve.trace import TraceId
from router.validation import (
    ModelLimits,
    check_model,
    check_prompt_form,
    check_prompt_tokens,
    check_request_id,
    check_sampling,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """How a prompt becomes tokens."""

    add_special_tokens: bool | None = None
    """None is the form's own way: the tokenizer's for text; a chat template writes its own."""
    add_generation_prompt: bool = True
    """Ends a chat with the opening of an answer."""
    cache_salt: str = ""
    """Narrows the tenant's part of the prefix caches."""


PLAIN_PROMPT = PromptOptions()

MAX_IDS_ON_LOOP = 8192
"""Longer prompts are looked at in a thread: 131,072 ids take 13 ms, and streams must go on."""


class RequestMaker:
    """Turns a client's message into the request that workers see. Checks everything first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: Callable[[], ModelLimits],
        eos_token_ids: tuple[int, ...],
        front_id: FrontId,
    ) -> None:
        """Takes the parts of one served model; `limits` says what holds now."""
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._front_id = front_id

    @property
    def limits(self) -> ModelLimits:
        """What holds now."""
        return self._limits()

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's."""
        return self._tokenizer

    async def make(
        self,
        wire: inference_pb2.GenerateRequest,
        deadline_s: float | None,
        *,
        tenant_salt: bytes = b"",
        options: PromptOptions = PLAIN_PROMPT,
        trace_id: TraceId | None = None,
    ) -> Request:
        """Checks, renders, tokenizes and completes a request.

        Raises:
            InvalidField: a field holds what is not allowed; the error names it.
            TooLong: the prompt, or prompt plus max_tokens, does not fit.
            ModelNotFound: another model is asked for.
        """
        limits = self._limits()
        check_request_id(wire.request_id)
        check_model(wire.model, limits)
        await _check_form(wire, limits)
        token_ids = await self._tokenize(wire, limits, options)
        field = {"chat": "chat.messages"}.get(wire.WhichOneof("prompt") or "")
        check_prompt_tokens(field or wire.WhichOneof("prompt") or "", token_ids, limits)
        sampling = check_sampling(
            wire.sampling, len(token_ids), limits, lambda: secrets.randbits(64)
        )
        return Request(
            request_id=RequestId(wire.request_id or f"gen-{secrets.token_hex(12)}"),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            eos_token_ids=self._eos_token_ids,
            tenant_salt=tenant_salt,
            front_id=self._front_id,
            deadline_s=deadline_s,
            trace_id=trace_id,
        )

    async def make_echo(self, request: Request) -> inference_pb2.PromptChunk | None:
        """Returns the prompt as its client gets it back; None when it is not asked for."""
        if not request.sampling.echo:
            return None
        if request.num_prompt_tokens > MAX_IDS_ON_LOOP:
            return await asyncio.to_thread(_echo, request, self._tokenizer.table)
        return _echo(request, self._tokenizer.table)

    async def tokenize(
        self, wire: inference_pb2.GenerateRequest, options: PromptOptions
    ) -> tuple[int, ...]:
        """Checks and tokenizes a prompt alone.

        Raises:
            InvalidField: as `make`.
            ModelNotFound: as `make`.
        """
        limits = self._limits()
        check_model(wire.model, limits)
        await _check_form(wire, limits)
        return await self._tokenize(wire, limits, options)

    async def _tokenize(
        self, wire: inference_pb2.GenerateRequest, limits: ModelLimits, options: PromptOptions
    ) -> tuple[int, ...]:
        form = wire.WhichOneof("prompt")
        if form == "token_ids":
            if len(wire.token_ids.ids) > MAX_IDS_ON_LOOP:
                return await asyncio.to_thread(tuple, wire.token_ids.ids)
            return tuple(wire.token_ids.ids)
        if form == "text":
            return await self._tokenizer.encode(
                wire.text, add_special_tokens=options.add_special_tokens is not False
            )
        if self._template is None:
            raise InvalidField("chat", "a chat", "absent: this model has no chat template")
        messages = [Message(role=one.role, content=one.content) for one in wire.chat.messages]
        limit = limits.max_prompt_characters + 64 * len(messages)
        text = await asyncio.to_thread(
            self._template.render,
            messages,
            limit,
            add_generation_prompt=options.add_generation_prompt,
        )
        # The template writes special tokens such as BOS itself.
        return await self._tokenizer.encode(
            text, add_special_tokens=options.add_special_tokens is True
        )


async def _check_form(wire: inference_pb2.GenerateRequest, limits: ModelLimits) -> None:
    if len(wire.token_ids.ids) > MAX_IDS_ON_LOOP:
        await asyncio.to_thread(check_prompt_form, wire, limits)
    else:
        check_prompt_form(wire, limits)


def _echo(request: Request, table: TokenTable) -> inference_pb2.PromptChunk:
    prompt = request.token_ids[: request.num_prompt_tokens]
    skip = request.sampling.skip_special_tokens
    text = detokenize(table, prompt, skip_special_tokens=skip)
    return inference_pb2.PromptChunk(token_ids=prompt, text=text)


def mint_handoff_id() -> HandoffId:
    """Returns an id that names one request's hand-offs over all its attempts."""
    return HandoffId(secrets.token_hex(16))
