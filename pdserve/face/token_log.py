"""What a worker has told, or still has to tell, its router fronts about each request.

The log is the only store of outbound tokens: a front's stream sends whatever its requests have
beyond what was sent, so updates coalesce by themselves while a front is slow, and a stream that
breaks resumes by moving `num_sent` back. Pure; the rim is `streams.py`.
"""

from dataclasses import dataclass, field

from pdserve.request import FrontId, RequestId
from pdserve.rpc.v1 import types_pb2, worker_pb2
from pdserve.timeline import Clock

PROMPT_PIECE_ENTRIES = 2048
"""Log-probabilities in one message, about 30 KB."""

Outcome = (
    worker_pb2.Finished
    | worker_pb2.Returned
    | worker_pb2.NeedsPlacement
    | worker_pb2.Failed
    | worker_pb2.HandedOff
)


@dataclass(slots=True)
class _Entry:
    """One attempt of one request."""

    front_id: FrontId
    attempt: int
    decode_attempt: int
    first_index: int
    """Output index of tokens[0]."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    """Of the prompt from position 1 on; complete before the first token."""
    times: worker_pb2.StageTimes = field(default_factory=worker_pb2.StageTimes)
    outcome: worker_pb2.SequenceUpdate | None = None
    """An update that holds nothing but its outcome."""
    num_sent: int = 0
    num_prompt_sent: int = 0
    is_outcome_sent: bool = False
    ended_at_s: float | None = None


class TokenLog:
    """All requests of one worker; used from the event loop only."""

    def __init__(self, clock: Clock, retention_s: float = 30.0) -> None:
        """Ended requests stay for `retention_s`, so that a broken stream can fetch their end."""
        self._clock = clock
        self._retention_s = retention_s
        self._entries: dict[RequestId, _Entry] = {}
        self._dirty: dict[FrontId, dict[RequestId, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, front_id: FrontId, request_id: RequestId, attempt: int) -> None:
        """Records a request that has nothing to tell yet: it is known, and may be orphaned."""
        entry = self._entries.get(request_id)
        if entry is None or attempt > entry.attempt:
            self._entries[request_id] = _Entry(front_id, attempt, 0, 0)

    def append(self, front_id: FrontId, update: worker_pb2.SequenceUpdate) -> None:
        """Records an update from the rank; a newer attempt replaces what an older one left."""
        request_id = RequestId(update.request_id)
        entry = self._entries.get(request_id)
        if entry is not None and update.attempt < entry.attempt:
            return
        if entry is None or update.attempt > entry.attempt:
            entry = _Entry(front_id, update.attempt, update.decode_attempt, update.first_index)
            self._entries[request_id] = entry
        entry.decode_attempt = update.decode_attempt
        if update.HasField("prompt_logprobs"):
            entry.prompt_logprobs.extend(update.prompt_logprobs.logprobs)
        if update.token_ids:
            if not entry.tokens:
                entry.first_index = update.first_index
            skip = entry.first_index + len(entry.tokens) - update.first_index
            entry.tokens.extend(update.token_ids[skip:])
            entry.logprobs.extend(update.logprobs[skip:])
        entry.times.MergeFrom(update.times)
        if update.WhichOneof("outcome") is not None:
            self._set_outcome(entry, update)
        self._dirty.setdefault(front_id, {})[request_id] = None

    def _set_outcome(self, entry: _Entry, update: worker_pb2.SequenceUpdate) -> None:
        outcome = worker_pb2.SequenceUpdate()
        outcome.CopyFrom(update)
        outcome.ClearField("token_ids")
        outcome.ClearField("logprobs")
        entry.outcome = outcome
        entry.is_outcome_sent = False
        if not update.HasField("needs_placement"):
            entry.ended_at_s = self._clock.now()

    def resume(self, front_id: FrontId, resumes: list[worker_pb2.Resume]) -> None:
        """Marks what a front that reconnects does not have yet; unknown requests are returned."""
        for resume in resumes:
            request_id = RequestId(resume.request_id)
            entry = self._entries.get(request_id)
            if entry is None or entry.attempt < resume.attempt:
                self.append(front_id, _unknown(resume))
                continue
            if entry.attempt == resume.attempt:
                have = max(0, resume.next_index - entry.first_index)
                entry.num_sent = min(entry.num_sent, have)
                have_prompt = max(0, resume.next_prompt_position - 1)
                entry.num_prompt_sent = min(entry.num_prompt_sent, have_prompt)
                entry.is_outcome_sent = False
                self._dirty.setdefault(front_id, {})[request_id] = None

    def take(self, front_id: FrontId) -> list[worker_pb2.SequenceUpdate]:
        """Returns one update per request that has news for this front, and counts them as sent.

        Log-probabilities of prompts leave in pieces, one request's piece a call, before any token
        of their request: so they hold up no other request, and come first in their own.
        """
        updates = []
        has_room_for_prompt = True
        for request_id in self._dirty.pop(front_id, {}):
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            if entry.num_prompt_sent < len(entry.prompt_logprobs):
                if has_room_for_prompt:
                    updates.append(self._take_prompt_piece(request_id, entry))
                    has_room_for_prompt = False
                # To the end of the queue: there may be more, and the tokens behind it.
                self._dirty.setdefault(front_id, {})[request_id] = None
                continue
            update = worker_pb2.SequenceUpdate(
                request_id=request_id,
                attempt=entry.attempt,
                decode_attempt=entry.decode_attempt,
                first_index=entry.first_index + entry.num_sent,
                token_ids=entry.tokens[entry.num_sent :],
                logprobs=entry.logprobs[entry.num_sent :],
                times=entry.times,
            )
            entry.num_sent = len(entry.tokens)
            if entry.outcome is not None and not entry.is_outcome_sent:
                update.MergeFrom(_only_outcome(entry.outcome))
                entry.is_outcome_sent = True
            updates.append(update)
        return updates

    def _take_prompt_piece(self, request_id: RequestId, entry: _Entry) -> worker_pb2.SequenceUpdate:
        start = entry.num_prompt_sent
        end, num_entries = start, 0
        while end < len(entry.prompt_logprobs) and num_entries < PROMPT_PIECE_ENTRIES:
            num_entries += 1 + len(entry.prompt_logprobs[end].top)
            end += 1
        entry.num_prompt_sent = end
        piece = worker_pb2.PromptLogprobs(
            first_position=start + 1, logprobs=entry.prompt_logprobs[start:end]
        )
        return worker_pb2.SequenceUpdate(
            request_id=request_id,
            attempt=entry.attempt,
            decode_attempt=entry.decode_attempt,
            first_index=entry.first_index,
            prompt_logprobs=piece,
        )

    def has_news(self, front_id: FrontId) -> bool:
        """Says whether `take` would return anything."""
        return bool(self._dirty.get(front_id))

    def open_requests(self, front_id: FrontId) -> list[tuple[RequestId, int]]:
        """Returns (request, attempt) of this front's requests that have not ended."""
        return [
            (request_id, entry.attempt)
            for request_id, entry in self._entries.items()
            if entry.front_id == front_id and entry.ended_at_s is None
        ]

    def forget(self, request_id: RequestId, attempt: int) -> None:
        """Drops a cancelled request, unless a newer attempt runs here."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.attempt <= attempt:
            self._remove(request_id)

    def expire(self) -> None:
        """Drops what ended longer than the retention ago."""
        limit = self._clock.now() - self._retention_s
        ended = [
            request_id
            for request_id, entry in self._entries.items()
            if entry.ended_at_s is not None and entry.ended_at_s < limit
        ]
        for request_id in ended:
            self._remove(request_id)

    def _remove(self, request_id: RequestId) -> None:
        """Drops an entry, and what a front that never came back was still to be told of it."""
        front_id = self._entries.pop(request_id).front_id
        dirty = self._dirty.get(front_id)
        if dirty is not None:
            dirty.pop(request_id, None)
            if not dirty:
                del self._dirty[front_id]


def _only_outcome(update: worker_pb2.SequenceUpdate) -> worker_pb2.SequenceUpdate:
    """Returns a copy without ids, so that merging it sets the outcome alone."""
    copy = worker_pb2.SequenceUpdate()
    copy.CopyFrom(update)
    for name in ("request_id", "attempt", "decode_attempt", "first_index", "times"):
        copy.ClearField(name)
    return copy


def _unknown(resume: worker_pb2.Resume) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(
        request_id=resume.request_id,
        attempt=resume.attempt,
        first_index=resume.next_index,
        returned=worker_pb2.Returned(
            reason=worker_pb2.Returned.REASON_UNKNOWN_REQUEST,
            detail="this worker holds no such attempt",
        ),
    )
