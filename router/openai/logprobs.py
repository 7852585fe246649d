"""Log-probabilities as chat and completions show them."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

from pdserve.detokenizer import TokenTable
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.openai.json_parts import Parts

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenTexts:
    """The text of single tokens."""

    def __init__(self, table: TokenTable) -> None:
        """Takes the served model's tokens."""
        self._token_bytes = table.token_bytes
        self.special_ids = table.special_ids

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
    return {"content": [_chat_entry(texts, one) for one in logprobs], "refusal": None}


def chat_logprobs_parts(
    texts: TokenTexts, logprobs: Sequence[types_pb2.TokenLogprob]
) -> dict[str, object]:
    """Returns the same of a whole answer."""
    return {"content": Parts(logprobs, partial(_chat_entry, texts)), "refusal": None}


def _chat_entry(texts: TokenTexts, one: types_pb2.TokenLogprob) -> dict[str, object]:
    return {
        **_entry(texts, one.token_id, one.logprob),
        "top_logprobs": [_entry(texts, top.token_id, top.logprob) for top in one.top],
    }


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": texts.text_of(token_id),
        "logprob": _shown(logprob),
        "bytes": list(texts.bytes_of(token_id)),
    }


class TextOffset:
    """Counts the characters that a choice's tokens have completed so far."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        """Starts at the first character."""
        self._texts = texts
        self._skipped = texts.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def push(self, token_id: int) -> int:
        """Takes the next token; returns where it begins."""
        start = self._num_characters
        if token_id not in self._skipped:
            self._num_characters += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return start


class CompletionLogprobs:
    """The parallel lists of one choice of `/v1/completions`, as it grows."""

    def __init__(self, texts: TokenTexts, num_top: int, *, skip_special_tokens: bool) -> None:
        """Starts at the first token; shows so many alternatives of each."""
        self._texts = texts
        self._num_top = num_top
        self._offset = TextOffset(texts, skip_special_tokens=skip_special_tokens)

    def first(self, token_id: int) -> dict[str, list[object]]:
        """Returns the lists of an echoed prompt's first token, which follows nothing."""
        return {
            "tokens": [self._texts.text_of(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset.push(token_id)],
        }

    def lists(self, logprobs: Sequence[types_pb2.TokenLogprob]) -> dict[str, list[object]]:
        """Returns the lists of the tokens that follow."""
        columns = self._columns().items()
        return {name: [show(one) for one in logprobs] for name, show in columns}

    def parts(
        self,
        runs: Sequence[Sequence[types_pb2.TokenLogprob]],
        head: Mapping[str, Sequence[object]],
    ) -> dict[str, Parts]:
        """Returns the lists of all tokens of a choice.

        Args:
            runs: of all tokens, one run of them behind the other: to copy them into one list takes
                40 ms for a prompt of 131,072.
            head: of `first`, or nothing.
        """
        columns = self._columns().items()
        return {
            name: Parts(chain.from_iterable(runs), show, head.get(name, ()))
            for name, show in columns
        }

    def _columns(self) -> dict[str, Callable[[types_pb2.TokenLogprob], object]]:
        return {
            "tokens": lambda one: self._texts.text_of(one.token_id),
            "token_logprobs": lambda one: _shown(one.logprob),
            "top_logprobs": self._alternatives,
            "text_offset": lambda one: self._offset.push(one.token_id),
        }

    def _alternatives(self, one: types_pb2.TokenLogprob) -> dict[str, float]:
        text_of = self._texts.text_of
        top = one.top[: self._num_top]
        return {
            text_of(one.token_id): _shown(one.logprob),
            **{text_of(other.token_id): _shown(other.logprob) for other in top},
        }


class PromptLogprobs:
    """`prompt_logprobs` as vLLM shows it: null, then an object per token, by token id."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        """Shows so many alternatives beside each token of the prompt."""
        self._texts = texts
        self._num_top = num_top

    def piece(self, chunk: inference_pb2.PromptChunk) -> list[object]:
        """Returns a piece of a stream; the pieces follow each other."""
        shown = [self._entry(one) for one in chunk.logprobs]
        return [None, *shown] if chunk.first_position == 1 else shown

    def parts(self, logprobs: Sequence[types_pb2.TokenLogprob]) -> Parts:
        """Returns all of it."""
        return Parts(logprobs, self._entry, (None,))

    def _entry(self, one: types_pb2.TokenLogprob) -> object:
        top = one.top[: self._num_top]
        ranks = {other.token_id: rank for rank, other in enumerate(top, start=1)}
        found = {one.token_id: one.logprob, **{other.token_id: other.logprob for other in top}}
        return {
            str(token_id): {
                "logprob": _shown(logprob),
                # Workers do not say what the rank of a token beyond the alternatives is.
                "rank": ranks.get(token_id),
                "decoded_token": self._texts.text_of(token_id),
            }
            for token_id, logprob in found.items()
        }


def _shown(logprob: float) -> float:
    # Not `max`: NaN must not get through either.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
