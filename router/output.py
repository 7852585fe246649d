"""What a client sees of a token: text, ids and log-probs, all cut at the same place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.detokenizer import Detokenizer, StopFinder, TokenTable
from pdserve.request import FinishReason, SamplingParams
from pdserve.rpc.v1 import types_pb2
from router.attempt import Finish, Token


@dataclass(kw_only=True, slots=True)
class Delta:
    """New output of one sample since its last delta."""

    index: int = 0
    """Which of the n samples."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    text: str = ""

    def num_bytes(self) -> int:
        """Returns about the bytes it takes in memory and on the wire."""
        num_bytes = 64 + 4 * len(self.token_ids) + 4 * len(self.text)
        if self.logprobs:
            num_bytes += sum(16 + 12 * len(one.top) for one in self.logprobs)
        return num_bytes

    def extend(self, later: "Delta") -> None:
        """Appends the delta that follows this one."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text += later.text


class Output:
    """Turns ordered tokens into deltas and finds stop strings.

    The token that completes a stop string is the last one that counts: ids, log-probs and usage
    end with it, and its text is cut where the stop begins.
    """

    def __init__(self, table: TokenTable, sampling: SamplingParams, index: int = 0) -> None:
        """Starts the empty output of one sample."""
        self.index = index
        self._detokenizer = Detokenizer(table, skip_special_tokens=sampling.skip_special_tokens)
        self._stops = StopFinder(sampling.stop, include_stop=sampling.include_stop_in_output)
        self._has_stops = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_in_output
        self.num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, tokens: Sequence[Token], finish: Finish | None) -> Delta:
        """Takes ordered tokens; `finish` is set when the last of them ends the sequence.

        After a stop string is found the rest of `tokens` is dropped, see `matched_stop`.
        """
        delta = Delta(index=self.index)
        for position, token in enumerate(tokens, start=1):
            is_last = finish is not None and position == len(tokens)
            self._push_token(token, delta, is_last and self._is_hidden(token, finish))
            if self._stops.matched is not None:
                return delta
        if finish is not None:
            delta.text += self._finish_text()
        return delta

    def push_next(self, token_id: int) -> Delta:
        """Takes the next token, alone, without log-probs, and not the last of the sequence.

        Afterwards see `matched_stop`, as after `push`.
        """
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        if self._has_stops and self.num_tokens > self._min_tokens:
            text = self._stops.push(text)
        return Delta(index=self.index, token_ids=[token_id], logprobs=[], text=text)

    def _push_token(self, token: Token, delta: Delta, is_hidden: bool) -> None:
        self.num_tokens += 1
        delta.token_ids.append(token.token_id)
        if token.logprob is not None:
            delta.logprobs.append(token.logprob)
        text = "" if is_hidden else self._detokenizer.push(token.token_id)
        # A stop string may not begin in the first min_tokens tokens.
        delta.text += text if self.num_tokens <= self._min_tokens else self._stops.push(text)

    def _is_hidden(self, token: Token, finish: Finish | None) -> bool:
        assert finish is not None
        return (
            finish.reason is FinishReason.STOP
            and finish.stop_token_id == token.token_id
            and not self._include_stop
        )

    def _finish_text(self) -> str:
        tail = self._detokenizer.flush()
        shown = self._stops.push(tail) if tail else ""
        return shown if self._stops.matched is not None else shown + self._stops.flush()
