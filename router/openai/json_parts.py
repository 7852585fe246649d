"""JSON of long answers in parts, so that the event loop can turn in between."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from router.openai.errors import encode_json

T = TypeVar("T")

PART_ENTRIES = 128
"""Of a long list; with 20 alternatives each it takes some milliseconds."""


BYTES_PER_TURN = 16 * 1024
"""So much JSON of log-probs takes some milliseconds."""
PART_CHARACTERS = 16 * 1024
"""Of a long text: the prompt that `echo` gives back may have megabytes."""


class Parts:
    """A list that is shown piece by piece, and never there as a whole."""

    def __init__(
        self, values: Iterable[T], show: Callable[[T], object], head: Sequence[object] = ()
    ) -> None:
        """Takes values, what each is shown as, and what stands before them."""
        self._pieces = _pieces(values, show, head)

    def pieces(self) -> Iterator[list[object]]:
        """Yields the list once, in order."""
        return self._pieces


def _pieces(
    values: Iterable[T], show: Callable[[T], object], head: Sequence[object]
) -> Iterator[list[object]]:
    yield list(head)
    rest = iter(values)
    while piece := [show(value) for value in islice(rest, PART_ENTRIES)]:
        yield piece


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is JSON already."""

    text: bytes


def json_parts(value: object) -> Iterator[bytes]:
    """Yields the JSON of a value; each part takes some milliseconds at most."""
    if isinstance(value, Encoded):
        yield value.text
    elif isinstance(value, Parts):
        yield from _list_parts(value.pieces())
    elif isinstance(value, list) and len(value) > PART_ENTRIES:
        yield from _list_parts(Parts(value, _as_it_is).pieces())
    elif isinstance(value, str) and len(value) > PART_CHARACTERS:
        yield b'"'
        for start in range(0, len(value), PART_CHARACTERS):
            yield encode_json(value[start : start + PART_CHARACTERS])[1:-1]
        yield b'"'
    elif isinstance(value, dict) and value:
        for number, (name, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + encode_json(name) + b":"
            yield from json_parts(inner)
        yield b"}"
    else:
        yield encode_json(value)


async def encode_in_turns(value: object) -> bytes:
    """Encodes; while much is to be done, others have their turn."""
    text = bytearray()
    next_turn = BYTES_PER_TURN
    for part in json_parts(value):
        text += part
        if len(text) >= next_turn:
            next_turn = len(text) + BYTES_PER_TURN
            await asyncio.sleep(0)
    return bytes(text)


def _list_parts(pieces: Iterator[list[object]]) -> Iterator[bytes]:
    separator = b"["
    for piece in pieces:
        if piece:
            yield separator + encode_json(piece)[1:-1]
            separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _as_it_is(value: object) -> object:
    return value
