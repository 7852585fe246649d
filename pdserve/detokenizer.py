"""Turns token ids into text, one token at a time, never splitting a character.

A table gives the bytes of every token, so the cost of a token does not depend on how many came
before. Bytes that do not end a character wait in a UTF-8 decoder. Two families are known:

- byte-level BPE: each character of a token stands for one byte (GPT-2's table);
- byte fallback: `▁` is a space and `<0xAB>` is a byte. Unlike a decode of the output alone, the
  space before the first word stays, because it stands between prompt and output.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """The bytes of every token id; ids without a token are None."""

    token_bytes: tuple[bytes | None, ...]
    special_ids: frozenset[int]

    @classmethod
    def from_tokenizer_json(cls, text: str) -> "TokenTable":
        """Reads the table out of a tokenizer.json.

        Raises:
            ConfigError: the tokenizer is of no known family.
        """
        spec = json.loads(text)
        vocabulary = spec["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            raise ConfigError(f"tokenizer model {spec['model'].get('type')!r} is not supported")
        decoder_types = set(_decoder_types(spec.get("decoder")))
        if "ByteLevel" in decoder_types:
            to_bytes = _byte_level_bytes
        elif decoder_types & {"ByteFallback", "Metaspace"}:
            to_bytes = _byte_fallback_bytes
        else:
            found = ", ".join(sorted(decoder_types)) or "none"
            raise ConfigError(f"tokenizer decoder must be ByteLevel or ByteFallback, got {found}")
        by_id: dict[int, bytes] = {index: to_bytes(token) for token, index in vocabulary.items()}
        added = spec.get("added_tokens", ())
        by_id.update((token["id"], token["content"].encode()) for token in added)
        return cls(
            token_bytes=tuple(by_id.get(index) for index in range(max(by_id) + 1)),
            special_ids=frozenset(token["id"] for token in added if token["special"]),
        )


def _decoder_types(decoder: dict[str, object] | None) -> Iterable[str]:
    if decoder is None:
        return
    yield str(decoder["type"])
    parts = decoder.get("decoders", ())
    assert isinstance(parts, Sequence)
    for part in parts:
        yield from _decoder_types(part)


def _gpt2_characters() -> dict[str, int]:
    """Returns GPT-2's `bytes_to_unicode` turned round: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update((chr(256 + offset), byte) for offset, byte in enumerate(others))
    return table


_CHARACTER_TO_BYTE = _gpt2_characters()


def _byte_level_bytes(token: str) -> bytes:
    if all(character in _CHARACTER_TO_BYTE for character in token):
        return bytes(_CHARACTER_TO_BYTE[character] for character in token)
    return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes((int(byte[1], 16),))
    return token.replace(_WORD_START, " ").encode()


class Detokenizer:
    """The text of one sequence, as it grows."""

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True) -> None:
        """Starts an empty text."""
        self._token_bytes = table.token_bytes
        self._skipped = table.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_in_character = False

    def push(self, token_id: int) -> str:
        """Returns the characters that this token completes; often one word, sometimes none."""
        if token_id in self._skipped or token_id >= len(self._token_bytes):
            return ""
        piece = self._token_bytes[token_id] or b""
        if not self._is_in_character:
            # Nearly every token is whole characters, and the decoder is slower by 5 times.
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(piece)
        self._is_in_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes U+FFFD."""
        self._is_in_character = False
        return self._decoder.decode(b"", final=True)


def detokenize(
    table: TokenTable, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Returns the text of a whole sequence, as a `Detokenizer` would bit by bit."""
    token_bytes = table.token_bytes
    skipped = table.special_ids if skip_special_tokens else frozenset[int]()
    pieces = (
        token_bytes[token_id] or b""
        for token_id in token_ids
        if token_id not in skipped and token_id < len(token_bytes)
    )
    return b"".join(pieces).decode(errors="replace")


class StopFinder:
    """Finds the first stop string in a growing text and holds back what may become one."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Takes the stop strings, none of them empty."""
        assert all(stops)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max((len(stop) for stop in stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns what may be shown; sets `matched` once a stop string is complete.

        Of several stops the one that is complete first wins, and of those the longest, so that
        the result does not depend on how the text was cut into tokens.
        """
        assert self.matched is None
        if not self._stops or (not self._held and self._first_characters.isdisjoint(text)):
            return text
        self._held += text
        found = self._find_first()
        if found is not None:
            start, stop = found
            self.matched = stop
            shown = self._held[: start + len(stop) if self._include_stop else start]
            self._held = ""
            return shown
        keep = self._longest_partial()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Returns what was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _find_first(self) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _longest_partial(self) -> int:
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
