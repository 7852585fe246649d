"""What waits for one client: bounded by bytes, merged while the client is slow."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.request import Request
from pdserve.rpc.v1 import inference_pb2
from router.output import Delta


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The one terminal event: a completion or an error."""

    completion: inference_pb2.Completion | None = None
    error: PdserveError | None = None


class ClientBuffer:
    """Between the reader of worker streams, who never waits, and one client's handler.

    What is pushed while the handler writes is merged; it takes all of that at its next turn.
    """

    __slots__ = (
        "_awaits_prompt",
        "_max_bytes",
        "_on_cut",
        "_pending",
        "_pending_bytes",
        "_prompt",
        "_taken",
        "_waiter",
        "ending",
    )

    def __init__(self, max_bytes: int, *, awaits_prompt: bool = False) -> None:
        """Starts empty.

        Args:
            max_bytes: bound on waiting output. What is said of the prompt does not count: it was
                bounded when the request was taken.
            awaits_prompt: keeps output back until `open_output`.
        """
        self._max_bytes = max_bytes
        self._awaits_prompt = awaits_prompt
        self._prompt: deque[inference_pb2.PromptChunk] = deque()
        self._pending: dict[int, Delta] = {}
        self._pending_bytes = 0
        self._taken: deque[Delta] = deque()
        """No longer merged, and on their way: the deltas of several samples leave one by one."""
        self._waiter: asyncio.Future[None] | None = None
        """Of the handler, while there is nothing for it; made once per token."""
        self._on_cut: Callable[[], object] | None = None
        self.ending: Ending | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes not yet taken by the handler."""
        return self._pending_bytes

    def push(self, delta: Delta) -> bool:
        """Adds output; False when the client is too far behind and must be cut."""
        if self.ending is not None or not (delta.token_ids or delta.text):
            return True
        self._pending_bytes += delta.num_bytes()
        if self._pending_bytes > self._max_bytes:
            return False
        waiting = self._pending.setdefault(delta.index, delta)
        if waiting is not delta:
            waiting.extend(delta)
        self._wake()
        return True

    def push_prompt(self, chunk: inference_pb2.PromptChunk) -> None:
        """Adds what is said of the prompt; it leaves before any output."""
        if self.ending is None:
            self._prompt.append(chunk)
            self._wake()

    def open_output(self) -> None:
        """Lets output out: all that was to be said of the prompt was said."""
        self._awaits_prompt = False
        self._wake()

    def end(self, ending: Ending) -> bool:
        """Sets the terminal event; False when there is one already."""
        if self.ending is not None:
            return False
        self.ending = ending
        self._awaits_prompt = False
        self._wake()
        return True

    def cut(self, error: PdserveError) -> bool:
        """Ends with an error, drops what waits, and interrupts a handler stuck in a write."""
        if not self.end(Ending(error=error)):
            return False
        self._prompt.clear()
        self._taken.clear()
        self._pending.clear()
        self._pending_bytes = 0
        if self._on_cut is not None:
            self._on_cut()
        return True

    def interrupt_with(self, on_cut: Callable[[], object]) -> None:
        """Names what unblocks the handler."""
        self._on_cut = on_cut

    async def take(self) -> Delta | inference_pb2.PromptChunk | None:
        """Returns the next that the client is told; None at the ending. For one handler only."""
        while True:
            if self._prompt:
                return self._prompt.popleft()
            if self._taken:
                return self._taken.popleft()
            if self._pending and not self._awaits_prompt:
                self._pending_bytes = 0
                if len(self._pending) == 1:
                    return self._pending.popitem()[1]
                self._taken.extend(self._pending.values())
                self._pending.clear()
                continue
            if self.ending is not None:
                return None
            assert self._waiter is None, "a buffer has one handler"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def make_buffer(
    request: Request, max_bytes: int, echo: inference_pb2.PromptChunk | None
) -> ClientBuffer:
    """Returns the buffer of a request; it begins with the prompt, if that is asked for."""
    has_scores = request.sampling.prompt_logprobs is not None and request.num_prompt_tokens > 1
    buffer = ClientBuffer(max_bytes, awaits_prompt=has_scores)
    if echo is not None:
        buffer.push_prompt(echo)
    return buffer
