"""One request in flight: its state machine and everything that hangs on it."""

import asyncio
from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.request import FinishReason
from pdserve.rpc.codec import finish_reason_to_wire
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.client_buffer import ClientBuffer
from router.output import Output
from router.policy import WorkerKey
from router.request_state import RequestState
from router.timing import RequestTimes


@dataclass(kw_only=True, slots=True, eq=False)
class ActiveRequest:
    """Owned by the dispatcher from admission to the terminal event."""

    state: RequestState
    output: Output
    times: RequestTimes
    buffer: ClientBuffer
    granules: tuple[int, ...]
    """Keys of the prompt's prefix."""
    deadline_at_s: float | None
    """On the router's clock."""
    tenant: str = ""
    """Who may abort it."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the driver has something to do."""
    driver: asyncio.Task[None] | None = None
    deadline_timer: asyncio.TimerHandle | None = None
    linger_timer: asyncio.TimerHandle | None = None
    is_waiting: bool = True
    """Counted as waiting by admission."""
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

    def completion(self, now_s: float) -> inference_pb2.Completion:
        """Returns the terminal message of a natural end."""
        state, output = self.state, self.output
        assert state.finish is not None
        stop_string = output.matched_stop
        sample = inference_pb2.SampleFinish(
            index=0,
            finish_reason=finish_reason_to_wire(self.finish_reason),
            num_tokens=output.num_tokens,
        )
        if stop_string is not None:
            sample.stop_string = stop_string
        elif state.finish.stop_token_id is not None:
            sample.stop_token_id = state.finish.stop_token_id
        return inference_pb2.Completion(
            samples=[sample],
            usage=types_pb2.Usage(
                prompt_tokens=state.request.num_prompt_tokens,
                completion_tokens=output.num_tokens,
                cached_tokens=self.times.cached_tokens,
            ),
            timeline=self.times.timeline(
                now_s=now_s,
                prefill_worker=self.prefill_worker,
                decode_worker=self.decode_worker,
                attempts=state.attempt,
                preemptions=state.num_preemptions,
            ),
        )
