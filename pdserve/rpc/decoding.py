"""Refuses bytes that are no message with INVALID_ARGUMENT.

grpc.aio 1.x answers UNKNOWN and logs a traceback, so that any stranger could fill the log.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.errors import InvalidField
from pdserve.rpc.status import AbortableContext, abort_with

TRequest = TypeVar("TRequest")
TResponse = TypeVar("TResponse")
Call = Callable[[object, AbortableContext], Awaitable[object]]
Generator = Callable[[object, AbortableContext], AsyncIterator[object]]


class _Undecodable:
    """Stands in for the request that was not one."""


_UNDECODABLE = _Undecodable()


class DecodingGuard(grpc.aio.ServerInterceptor):
    """Wraps every method that takes one request; others pass as they are."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails],
            # Only the stubs know it as a generic type.
            Awaitable["grpc.RpcMethodHandler[TRequest, TResponse] | None"],
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[TRequest, TResponse] | None":
        """Returns the method's handler, guarded."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode = _guarded_decoder(handler.request_deserializer)
        # The stubs describe handlers of the synchronous server.
        make, behaviour = (
            (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
        )
        guarded: Call | Generator = (
            _guarded_generator(cast(Generator, behaviour))
            if inspect.isasyncgenfunction(behaviour)
            else _guarded_call(cast(Call, behaviour))
        )
        make_handler = cast("Callable[..., grpc.RpcMethodHandler[TRequest, TResponse]]", make)
        return make_handler(guarded, decode, handler.response_serializer)


def _guarded_decoder(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def decode_or_mark(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError:
            return _UNDECODABLE

    return decode_or_mark


def _guarded_call(behaviour: Call) -> Call:
    async def call(request: object, context: AbortableContext) -> object:
        if request is _UNDECODABLE:
            await _refuse(context)
        return await behaviour(request, context)

    return call


def _guarded_generator(behaviour: Generator) -> Generator:
    async def generate(request: object, context: AbortableContext) -> AsyncIterator[object]:
        if request is _UNDECODABLE:
            await _refuse(context)
        async for response in behaviour(request, context):
            yield response

    return generate


async def _refuse(context: AbortableContext) -> None:
    await abort_with(context, InvalidField("request", b"", "a message of the method's type"))
