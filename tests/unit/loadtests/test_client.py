from collections.abc import Iterable, Iterator

import grpc
import pytest

from loadtests.client import LoadClient, LostTokens, make_request
from loadtests.meter import GENERATE, GOODPUT, ITL, TTFT, Event, Objectives
from loadtests.sessions import Ask
from pdserve.errors import PdserveError
from pdserve.rpc.v1 import inference_pb2

ASK = Ask(wait_s=0.0, prompt_ids=(400, 401), max_tokens=3)


def chunk(*token_ids: int) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    response.chunk.token_ids.extend(token_ids)
    return response


def completion(num_tokens: int) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    response.completion.usage.completion_tokens = num_tokens
    return response


class Refused(grpc.RpcError, grpc.Call):
    """What a sync call raises."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "nobody listens"

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def initial_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


class Seen:
    """Takes events and plays the server."""

    def __init__(self, answers: Iterable[object]) -> None:
        self.answers = answers
        self.events: list[tuple[str, PdserveError | None]] = []
        self.metadata: tuple[tuple[str, str], ...] = ()

    def fire(self, event: Event, error: PdserveError | None) -> None:
        self.events.append((event.name, error))

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.metadata = metadata
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, inference_pb2.GenerateResponse)
            yield answer

    def ask(self, api_key: str | None = None) -> tuple[int, ...]:
        ticks = iter(range(1000))
        client = LoadClient(
            self.generate,
            fire=self.fire,
            objectives=Objectives(ttft_s=5.0, tpot_s=5.0),
            api_key=api_key,
            clock=lambda: float(next(ticks)),
        )
        return client.ask(ASK, seed=7)


def test_a_stream_gives_its_tokens_and_an_event_for_each_thing_seen() -> None:
    seen = Seen([chunk(5), chunk(6, 7), completion(3)])
    assert seen.ask() == (5, 6, 7)
    assert seen.events == [(TTFT, None), (ITL, None), (GENERATE, None), (GOODPUT, None)]


@pytest.mark.parametrize(
    "answers",
    [
        [chunk(5), chunk(6)],
        [chunk(5), completion(3)],
        [completion(3)],
        [],
    ],
)
def test_a_stream_that_lost_tokens_or_its_end_is_a_failure(answers: list[object]) -> None:
    seen = Seen(answers)
    assert seen.ask() == ()
    name, error = seen.events[-1]
    assert name == GENERATE
    assert isinstance(error, LostTokens)


def test_an_error_in_mid_stream_is_one_failed_request() -> None:
    seen = Seen([chunk(5), Refused()])
    assert seen.ask() == ()
    assert [name for name, _ in seen.events] == [TTFT, GENERATE]
    assert isinstance(seen.events[-1][1], PdserveError)


def test_the_key_is_shown_and_only_if_there_is_one() -> None:
    seen = Seen([completion(0)])
    seen.ask("sk-a")
    assert seen.metadata == (("authorization", "Bearer sk-a"),)
    seen.ask()
    assert seen.metadata == ()


def test_a_request_asks_for_exactly_its_number_of_tokens() -> None:
    request = make_request(ASK, seed=7)
    assert list(request.token_ids.ids) == [400, 401]
    assert request.sampling.max_tokens == 3
    assert request.sampling.ignore_eos
    assert request.sampling.seed == 7
