"""Log-probabilities as chat and completions show them."""

import codecs
from collections.abc import Sequence

from pdserve.detokenizer import TokenTable
from pdserve.rpc.v1 import types_pb2

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenTexts:
    """The text of single tokens."""

    def __init__(self, table: TokenTable) -> None:
        """Takes the served model's tokens."""
        self._token_bytes = table.token_bytes

    def bytes_of(self, token_id: int) -> bytes:
        """Returns a token's bytes; none for an id without a text."""
        if token_id >= len(self._token_bytes):
            return b""
        return self._token_bytes[token_id] or b""

    def text_of(self, token_id: int) -> str:
        r"""Returns a token's text, or `bytes:\xe6\x9d` for a part of a character."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    texts: TokenTexts, logprobs: Sequence[types_pb2.TokenLogprob]
) -> dict[str, object]:
    """Returns `{"content": [...]}` with one entry per token."""
    return {
        "content": [
            {
                **_entry(texts, one.token_id, one.logprob),
                "top_logprobs": [_entry(texts, top.token_id, top.logprob) for top in one.top],
            }
            for one in logprobs
        ],
        "refusal": None,
    }


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": texts.text_of(token_id),
        "logprob": _shown(logprob),
        "bytes": list(texts.bytes_of(token_id)),
    }


class TextOffset:
    """Counts the characters that a choice's tokens have completed so far."""

    def __init__(self) -> None:
        """Starts at the first character."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = 0

    def push(self, token_bytes: bytes) -> int:
        """Takes the next token; returns where it begins."""
        start = self.num_characters
        self.num_characters += len(self._decoder.decode(token_bytes))
        return start


def completion_logprobs(
    texts: TokenTexts, logprobs: Sequence[types_pb2.TokenLogprob], offset: TextOffset
) -> dict[str, object]:
    """Returns parallel lists of new tokens; `offset` moves behind them."""
    return {
        "tokens": [texts.text_of(one.token_id) for one in logprobs],
        "token_logprobs": [_shown(one.logprob) for one in logprobs],
        "top_logprobs": [
            {
                texts.text_of(one.token_id): _shown(one.logprob),
                **{texts.text_of(top.token_id): _shown(top.logprob) for top in one.top},
            }
            for one in logprobs
        ],
        "text_offset": [offset.push(texts.bytes_of(one.token_id)) for one in logprobs],
    }


def _shown(logprob: float) -> float:
    # Not `max`: NaN must not get through either.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
