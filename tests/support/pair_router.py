"""What a router does for two engines of a test."""

from typing import Protocol

from pdserve.request import Request
from pdserve.rpc.v1 import worker_pb2
from pdserve.rpc.v1.types_pb2 import TokenLogprob
from tests.support.engine_requests import make_request
from tests.support.recording_outbox import RecordingOutbox


class Pair(Protocol):
    """What takes requests, and says how they go."""

    prefill_outbox: RecordingOutbox
    decode_outbox: RecordingOutbox

    def submit(self, request: Request) -> None:
        """Sends a request to prefill."""

    def place(self, request: Request) -> None:
        """Answers a NeedsPlacement."""


class PairRouter:
    """The router's part in a test: order by index, next attempts, placements."""

    def __init__(self, pair: Pair) -> None:
        self.outputs: dict[str, list[int]] = {}
        self.open: dict[str, Request] = {}
        self.num_returned = 0
        self._pair = pair
        self._original: dict[str, Request] = {}
        self._pending: dict[str, dict[int, int]] = {}
        self._ended: dict[str, int] = {}
        self._groups: dict[str, Request] = {}
        self._placed: set[tuple[str, int]] = set()
        self.prompt_logprobs: dict[str, dict[int, TokenLogprob]] = {}
        self.logprobs: dict[str, dict[int, TokenLogprob]] = {}

    def start(self, request: Request) -> None:
        self.adopt(request)
        self._pair.submit(request)

    def adopt(self, request: Request) -> None:
        """Follows a request, in all its samples, that the test submits itself."""
        for one in request.samples():
            if request.sampling.n > 1:
                self._groups[one.request_id] = request
            self._original[one.request_id] = one
            self.open[one.request_id] = one
            self.outputs[one.request_id] = []
            self._pending[one.request_id] = {}
            self.prompt_logprobs[one.request_id] = {}
            self.logprobs[one.request_id] = {}

    def read(self) -> None:
        for outbox in (self._pair.prefill_outbox, self._pair.decode_outbox):
            updates, outbox.updates = outbox.updates, []
            for update in updates:
                request = self.open.get(update.request_id)
                if request is not None and update.attempt == request.attempt:
                    self._take(request, update)

    def _take(self, request: Request, update: worker_pb2.SequenceUpdate) -> None:
        output = self.outputs[request.request_id]
        pending = self._pending[request.request_id]
        for offset, logprob in enumerate(update.prompt_logprobs.logprobs):
            known = self.prompt_logprobs[request.request_id]
            known[update.prompt_logprobs.first_position + offset] = logprob
        for offset, token in enumerate(update.token_ids):
            pending[update.first_index + offset] = token
        for offset, logprob in enumerate(update.logprobs):
            self.logprobs[request.request_id][update.first_index + offset] = logprob
        while len(output) in pending:
            output.append(pending.pop(len(output)))
        match update.WhichOneof("outcome"):
            case "finished":
                self._ended[request.request_id] = update.first_index + len(update.token_ids)
            case "returned":
                self._again(request)
            case "needs_placement":
                self._place(request, update.needs_placement.decode_attempt)
            case "failed":
                raise AssertionError(update.failed.message)
        if self._ended.get(request.request_id) == len(output):
            del self.open[request.request_id]

    def _place(self, request: Request, decode_attempt: int) -> None:
        """Samples that are still together are placed together, once."""
        group = self._groups.get(request.request_id)
        if group is None or group.attempt != request.attempt:
            self._pair.place(request)
        elif (group.request_id, decode_attempt) not in self._placed:
            self._placed.add((group.request_id, decode_attempt))
            self._pair.place(group)

    def _again(self, request: Request) -> None:
        self.num_returned += 1
        original = self._original[request.request_id]
        pending = self._pending[request.request_id]
        pending.clear()
        again = make_request(
            request.request_id,
            (*original.token_ids, *self.outputs[request.request_id]),
            num_prompt_tokens=original.num_prompt_tokens,
            sampling=original.sampling,
            attempt=request.attempt + 1,
            eos_token_ids=original.eos_token_ids,
            is_priority=True,
            sample_index=original.sample_index,
        )
        self.open[request.request_id] = again
        self._pair.submit(again)
