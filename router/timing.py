"""Where a request's time went: worker stage times merged with the router's own clock."""

from collections.abc import Iterable, Sequence

from pdserve.rpc.v1 import types_pb2, worker_pb2


class RequestTimes:
    """Collects the times of one request over all its attempts.

    Workers may repeat a stage (after a resumed stream), so the last word of an attempt counts;
    attempts add up.
    """

    def __init__(self, received_s: float) -> None:
        """Starts at the arrival of the request, on the router's clock."""
        self.received_s = received_s
        self.dispatched_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._num_tokens = 0
        self._first_gap_s = 0.0
        self._max_gap_s = 0.0
        self._by_attempt: dict[int, worker_pb2.StageTimes] = {}

    def note_dispatch(self, now_s: float) -> None:
        """Notes that a worker got the request; the first time ends the router's own queue."""
        if self.dispatched_s is None:
            self.dispatched_s = now_s

    def note_tokens(self, count: int, now_s: float) -> float | None:
        """Notes tokens that came in order, in one message; returns the gap before them.

        Further tokens of the message follow at once: their gaps are zero.
        """
        if not count:
            return None
        gap_s = None
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            gap_s = now_s - self.last_token_s
            if self._num_tokens == 1:
                self._first_gap_s = gap_s
            if gap_s > self._max_gap_s:
                self._max_gap_s = gap_s
        self.last_token_s = now_s
        self._num_tokens += count
        return gap_s

    def note_stages(self, attempt: int, times: worker_pb2.StageTimes) -> None:
        """Merges what a worker says of its own stages."""
        self._by_attempt.setdefault(attempt, worker_pb2.StageTimes()).MergeFrom(times)

    def stages_of(self, attempt: int) -> worker_pb2.StageTimes:
        """Returns what workers have said of one attempt."""
        return self._by_attempt.get(attempt, worker_pb2.StageTimes())

    @classmethod
    def joined(cls, parts: "Sequence[RequestTimes]") -> "RequestTimes":
        """Returns the times of several samples of one request as those of one.

        Stages add up; token times run from the first of all to the last of all, and gaps are the
        longest. The sample with the most tokens gives their number.
        """
        joined = cls(parts[0].received_s)
        joined.dispatched_s = _least(part.dispatched_s for part in parts)
        joined.first_token_s = _least(part.first_token_s for part in parts)
        last_s = [part.last_token_s for part in parts if part.last_token_s is not None]
        joined.last_token_s = max(last_s, default=None)
        joined._num_tokens = max(part._num_tokens for part in parts)
        joined._first_gap_s = max(part._first_gap_s for part in parts)
        joined._max_gap_s = max(part._max_gap_s for part in parts)
        stages = [(attempt, times) for part in parts for attempt, times in part._by_attempt.items()]
        stages.sort(key=lambda entry: entry[0])
        joined._by_attempt = {number: times for number, (_, times) in enumerate(stages)}
        return joined

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in a cache by the first attempt that computed the prompt."""
        for attempt in sorted(self._by_attempt):
            times = self._by_attempt[attempt]
            if times.HasField("cached_tokens"):
                return times.cached_tokens
        return 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.received_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first to the last token."""
        if self.first_token_s is None or self.last_token_s is None:
            return 0.0
        return self.last_token_s - self.first_token_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1); None below two tokens."""
        return self.decode_s / (self._num_tokens - 1) if self._num_tokens > 1 else None

    def stage_sums(self, now_s: float) -> worker_pb2.StageTimes:
        """Returns the stages over all attempts; the queue includes the router's own."""
        all_times = self._by_attempt.values()
        waited_s = (now_s if self.dispatched_s is None else self.dispatched_s) - self.received_s
        return worker_pb2.StageTimes(
            queue_s=waited_s + sum(times.queue_s for times in all_times),
            prefill_s=sum(times.prefill_s for times in all_times),
            handoff_s=sum(times.handoff_s for times in all_times),
            kv_blocks_shipped=sum(times.kv_blocks_shipped for times in all_times),
            kv_bytes_shipped=sum(times.kv_bytes_shipped for times in all_times),
            recomputed_tokens=sum(times.recomputed_tokens for times in all_times),
            local_prefill_tokens=sum(times.local_prefill_tokens for times in all_times),
        )

    def timeline(
        self,
        *,
        now_s: float,
        prefill_worker: str,
        decode_worker: str,
        attempts: int,
        preemptions: int,
    ) -> types_pb2.Timeline:
        """Returns the message for the client."""
        stages = self.stage_sums(now_s)
        return types_pb2.Timeline(
            queue_s=stages.queue_s,
            prefill_s=stages.prefill_s,
            handoff_s=stages.handoff_s,
            decode_s=self.decode_s,
            ttft_s=self.ttft_s or 0.0,
            first_gap_s=self._first_gap_s,
            max_gap_s=self._max_gap_s,
            tpot_s=self.tpot_s or 0.0,
            total_s=now_s - self.received_s,
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            attempts=attempts,
            kv_blocks_shipped=stages.kv_blocks_shipped,
            kv_bytes_shipped=stages.kv_bytes_shipped,
            recomputed_tokens=stages.recomputed_tokens,
            preemptions=preemptions,
            local_prefill_tokens=stages.local_prefill_tokens,
        )


def join_times(parts: Sequence[RequestTimes]) -> RequestTimes:
    """Returns the times of all samples of one request."""
    return parts[0] if len(parts) == 1 else RequestTimes.joined(parts)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
