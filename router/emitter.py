"""What a token means beyond its request's state: times, counts, text, and the client's share."""

from collections.abc import Sequence

from pdserve.request import FinishReason
from router.active import ActiveRequest
from router.attempt import Finish, Token
from router.metrics import RouterMetrics

_STOPPED = Finish(reason=FinishReason.STOP, stop_token_id=None)


class Emitter:
    """Passes tokens that a state machine has put in order on to what waits for the client.

    A stop string in the text ends the state. Both ways in return False when the client is too far
    behind.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        """Counts into the front's series."""
        self._metrics = metrics.tokens

    def emit(self, active: ActiveRequest, tokens: Sequence[Token], now_s: float) -> bool:
        """Takes new tokens, or the news that the sequence is finished."""
        self._metrics.note(len(tokens), active.times.note_tokens(len(tokens), now_s))
        delta = active.output.push(tokens, active.state.finish)
        if active.output.matched_stop is not None:
            active.state.stop_early(_STOPPED)
        return active.call.buffer.push(delta)

    def emit_next(self, active: ActiveRequest, token_id: int, now_s: float) -> bool:
        """Takes what `RequestState.take_next` took."""
        self._metrics.note(1, active.times.note_tokens(1, now_s))
        output = active.output
        delta = output.push_next(token_id)
        if output.matched_stop is not None:
            active.state.stop_early(_STOPPED)
        return active.call.buffer.push(delta)
