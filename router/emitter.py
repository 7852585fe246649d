"""What a token means beyond its request's state: times, counts, text, and the client's share."""

from collections.abc import Sequence

from pdserve.request import FinishReason
from router.active import ActiveRequest
from router.attempt import Finish, Token
from router.metrics import RouterMetrics
from router.output import Delta


class Emitter:
    """Passes tokens that a state machine has put in order on to what waits for the client."""

    def __init__(self, metrics: RouterMetrics) -> None:
        """Counts into the front's series."""
        self._note_tokens = metrics.tokens.note

    def emit(self, active: ActiveRequest, tokens: Sequence[Token], now_s: float) -> bool:
        """Takes new tokens, or the news that the sequence is finished.

        A stop string in the text ends the state. False: the client is too far behind.
        """
        self._note(active, len(tokens), now_s)
        return self._hand_on(active, active.output.push(tokens, active.state.finish))

    def emit_next(self, active: ActiveRequest, token_id: int, now_s: float) -> bool:
        """Takes what `RequestState.take_next` took; otherwise as `emit`."""
        self._note(active, 1, now_s)
        return self._hand_on(active, active.output.push_next(token_id))

    def _note(self, active: ActiveRequest, count: int, now_s: float) -> None:
        times = active.times
        last_s = times.last_token_s
        times.note_tokens(count, now_s)
        self._note_tokens(count, None if last_s is None else now_s - last_s)

    def _hand_on(self, active: ActiveRequest, delta: Delta) -> bool:
        if active.output.matched_stop is not None:
            active.state.stop_early(Finish(reason=FinishReason.STOP, stop_token_id=None))
        return active.call.buffer.push(delta)
