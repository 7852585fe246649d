"""One client's request in flight: its samples, their state machines and all that hangs on them.

Samples of one prompt set out together: one attempt, one prefill, one hand-off for all. A sample
that has to be continued parts from the others, and is from then on a request of its own.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.request import FinishReason, HandoffId, Request, RequestId
from pdserve.rpc.codec import finish_reason_to_wire
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.attempt import Phase
from router.client_buffer import ClientBuffer
from router.explain import MAX_PLACEMENTS, Explanation, PlacedAttempt, find_critical_path
from router.output import Output
from router.policy import Choice
from router.request_state import RequestState
from router.slo import NO_SLO, Slo
from router.timing import RequestTimes, join_times
from router.worker_key import WorkerKey


@dataclass(kw_only=True, slots=True, eq=False)
class ClientCall:
    """What a client waits for. Owned by the dispatcher from admission to the terminal event."""

    request: Request
    """For all samples, as it was checked."""
    handoff_id: HandoffId
    buffer: ClientBuffer
    granules: Sequence[int]
    """Keys of the prompt's prefix."""
    received_s: float
    deadline_at_s: float | None
    """On the router's clock."""
    tenant: str = ""
    slo: Slo = NO_SLO
    http_request_id: str | None = None
    """X-Request-Id of the HTTP call: for the log, and to find the request's explanation by."""
    samples: "list[ActiveRequest]" = field(default_factory=list)
    together: "list[ActiveRequest]" = field(default_factory=list)
    """Samples that have neither ended nor parted."""
    waiting: "set[ActiveRequest]" = field(default_factory=set)
    """Samples that no worker has; while there are any, admission counts the call as waiting."""
    deadline_timer: asyncio.TimerHandle | None = None
    placements: "list[PlacedAttempt]" = field(default_factory=list)
    """The latest choices made for its first sample."""
    explanation: Explanation | None = None
    """Of its whole life; set at its end."""

    def note_choice(self, attempt: int, choice: Choice, now_s: float) -> None:
        """Remembers a choice, to explain it."""
        at_s = now_s - self.received_s
        self.placements.append(PlacedAttempt(attempt=attempt, at_s=at_s, choice=choice))
        del self.placements[:-MAX_PLACEMENTS]

    def explain(self, state: str) -> Explanation:
        """Tells why it went where it went, and where its time went until now."""
        times = self.samples[0].times
        return Explanation(
            request_id=self.request_id,
            tenant=self.tenant,
            num_prompt_tokens=self.request.num_prompt_tokens,
            state=state,
            placements=tuple(self.placements),
            ttft_s=times.ttft_s,
            critical_path=find_critical_path(times, self.placements),
            tpot_s=times.tpot_s,
            http_request_id=self.http_request_id,
        )

    @property
    def request_id(self) -> RequestId:
        """The client's or the router's id."""
        return self.request.request_id

    @property
    def is_untouched(self) -> bool:
        """All samples wait, and none has any output: they can set out together (again)."""
        return len(self.together) == len(self.samples) and all(
            one.state.phase is Phase.WAITING and one.state.next_index == 0 for one in self.together
        )

    @property
    def num_output_tokens(self) -> int:
        """Over all samples."""
        return sum(one.output.num_tokens for one in self.samples)

    @property
    def times(self) -> RequestTimes:
        """Over all samples."""
        return join_times([one.times for one in self.samples])

    def part(self, active: "ActiveRequest") -> None:
        """Lets a sample go its own way."""
        if active in self.together:
            self.together.remove(active)
            self.wake()

    def wake(self) -> None:
        """Lets the samples that are together look who leads them."""
        for one in self.together:
            one.moved.set()

    def summary(self, now_s: float) -> dict[str, object]:
        """Returns what the log says of its life."""
        first, times = self.samples[0], self.times
        return {
            "request_id": self.request_id,
            "http_request_id": self.http_request_id,
            "trace_id": self.request.trace_id,
            "handoff_id": self.handoff_id,
            "prompt_tokens": self.request.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "attempts": max(one.state.attempt for one in self.samples),
            "preemptions": sum(one.state.num_preemptions for one in self.samples),
            "prefill_worker": first.prefill_worker,
            "decode_worker": first.decode_worker,
            "ttft_s": times.ttft_s,
            "tpot_s": times.tpot_s,
            "total_s": now_s - self.received_s,
        }

    def completion(self, now_s: float) -> inference_pb2.Completion:
        """Returns the terminal message of a natural end."""
        times = self.times
        first = self.samples[0]
        return inference_pb2.Completion(
            samples=[one.finish() for one in self.samples],
            usage=types_pb2.Usage(
                prompt_tokens=self.request.num_prompt_tokens,
                completion_tokens=self.num_output_tokens,
                cached_tokens=times.cached_tokens,
            ),
            timeline=times.timeline(
                now_s=now_s,
                prefill_worker=first.prefill_worker,
                decode_worker=first.decode_worker,
                attempts=max(one.state.attempt for one in self.samples),
                preemptions=sum(one.state.num_preemptions for one in self.samples),
            ),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class ActiveRequest:
    """One sample in flight; with n = 1, the request itself."""

    call: ClientCall
    state: RequestState
    output: Output
    times: RequestTimes
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the driver has something to do."""
    driver: asyncio.Task[None] | None = None
    linger_timer: asyncio.TimerHandle | None = None
    waiting_since_s: float | None = None
    """Since when no worker took it; bounds the wait over all refusals."""
    last_refusal: PdserveError | None = None
    fatal_refusal: PdserveError | None = None
    """A worker's refusal that no other worker would mend."""
    is_local_refused: bool = False
    """A decode worker had less of its prompt cached than was hoped."""
    avoided_until_s: dict[WorkerKey, float] = field(default_factory=dict)
    """Workers that refused a moment ago."""
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def buffer(self) -> ClientBuffer:
        """What waits for the client, of all samples."""
        return self.call.buffer

    @property
    def is_leader(self) -> bool:
        """Says whether it acts now, for itself or for those that are together with it."""
        together = self.call.together
        if self not in together:
            return True
        return self is next(one for one in together if one.state.phase is self.state.phase)

    @property
    def mates(self) -> "tuple[ActiveRequest, ...]":
        """Those that do what it does, itself included."""
        together = self.call.together
        return tuple(together) if self in together else (self,)

    @property
    def wire_id(self) -> RequestId:
        """The id under which its present attempt was submitted."""
        return self.call.request_id if self in self.call.together else self.state.request_id

    def excluded(self, now_s: float) -> frozenset[WorkerKey]:
        """Returns the workers to avoid now."""
        return frozenset(key for key, until_s in self.avoided_until_s.items() if until_s > now_s)

    def next_retry_s(self, now_s: float) -> float | None:
        """Returns seconds until an avoided worker may be asked again."""
        waits = [until_s - now_s for until_s in self.avoided_until_s.values() if until_s > now_s]
        return min(waits, default=None)

    @property
    def finish_reason(self) -> FinishReason:
        """How a natural end is called; a stop string may come with the last allowed token."""
        assert self.state.finish is not None
        is_stopped = self.output.matched_stop is not None
        return FinishReason.STOP if is_stopped else self.state.finish.reason

    def finish(self) -> inference_pb2.SampleFinish:
        """Encodes a natural end."""
        state, output = self.state, self.output
        assert state.finish is not None
        finish = inference_pb2.SampleFinish(
            index=output.index,
            finish_reason=finish_reason_to_wire(self.finish_reason),
            num_tokens=output.num_tokens,
        )
        if output.matched_stop is not None:
            finish.stop_string = output.matched_stop
        elif state.finish.stop_token_id is not None:
            finish.stop_token_id = state.finish.stop_token_id
        return finish
