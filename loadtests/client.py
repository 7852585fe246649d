"""Sends one request over gRPC, times its stream, and says what came of it."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from launcher.client import bearer
from loadtests.meter import Event, Meter, Objectives
from loadtests.sessions import Ask
from pdserve.errors import PdserveError
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import inference_pb2, types_pb2

Fire = Callable[[Event, PdserveError | None], None]
"""Takes each event, and the error of a request that failed."""


class GenerateCall(Protocol):
    """`InferenceStub.Generate`."""

    def __call__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> Iterable[inference_pb2.GenerateResponse]:
        """Begins a stream."""


class LoadClient:
    """One user's connection."""

    def __init__(
        self,
        generate: GenerateCall,
        *,
        fire: Fire,
        objectives: Objectives,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Sends nothing yet."""
        self._generate = generate
        self._fire = fire
        self._objectives = objectives
        self._metadata = bearer(api_key)
        self._timeout_s = timeout_s
        self._clock = clock

    def ask(self, ask: Ask, *, seed: int) -> tuple[int, ...]:
        """Runs a request to its end; returns its tokens, none if it failed.

        A stream that ends without a completion, or with fewer tokens than the server counted, is a
        failure: a load test that did not look would not see lost tokens.
        """
        meter = Meter(self._objectives, self._clock())
        token_ids: list[int] = []
        usage: types_pb2.Usage | None = None
        error: PdserveError | None = None
        request = make_request(ask, seed)
        try:
            for response in self._generate(
                request, timeout=self._timeout_s, metadata=self._metadata
            ):
                if response.HasField("completion"):
                    usage = response.completion.usage
                chunk = response.chunk.token_ids
                event = meter.take_tokens(self._clock(), len(chunk))
                token_ids += chunk
                if event is not None:
                    self._fire(event, None)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure)
        if error is None and (usage is None or usage.completion_tokens != len(token_ids)):
            error = LostTokens(f"{len(token_ids)} tokens came, not what the server counted")
        whole, *good = meter.finish(self._clock())
        self._fire(whole, error)
        if error is not None:
            return ()
        for event in good:
            self._fire(event, None)
        return tuple(token_ids)


class LostTokens(PdserveError):
    """The stream was not what the server said it was."""


def make_request(ask: Ask, seed: int) -> inference_pb2.GenerateRequest:
    """Writes an ask as a request that gives exactly as many tokens as it asks for."""
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(ask.prompt_ids)
    request.sampling.max_tokens = ask.max_tokens
    request.sampling.temperature = 1.0
    request.sampling.seed = seed
    request.sampling.ignore_eos = True
    return request
