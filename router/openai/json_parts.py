"""JSON of long answers in parts, so that the event loop can turn in between."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from router.openai.errors import encode_json

T = TypeVar("T")

PART_ENTRIES = 32
"""Of a long list; with 20 alternatives each it takes two milliseconds."""


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

    blocks: Sequence[bytes]


def json_parts(value: object) -> Iterator[bytes]:
    """Yields the JSON of a value; each part takes some milliseconds at most."""
    if isinstance(value, Encoded):
        yield from value.blocks
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


async def encode_in_turns(value: object) -> list[bytes]:
    """Encodes, and returns the JSON in blocks; while much is to be done, others have their turn."""
    blocks: list[bytes] = []
    block = bytearray()
    for part in json_parts(value):
        block += part
        if len(block) >= BYTES_PER_TURN:
            blocks.append(bytes(block))
            block.clear()
            await asyncio.sleep(0)
    blocks.append(bytes(block))
    return blocks


class BlockResponse:
    """A JSON answer in blocks: to join and copy 20 MB would hold up the loop for 60 ms."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        """Takes what `encode_in_turns` made."""
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends; waits while the client's window is full."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(sum(map(len, self._blocks))).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for block in self._blocks:
            await send({"type": "http.response.body", "body": block, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _list_parts(pieces: Iterator[list[object]]) -> Iterator[bytes]:
    separator = b"["
    for piece in pieces:
        if piece:
            yield separator + encode_json(piece)[1:-1]
            separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _as_it_is(value: object) -> object:
    return value
