"""Reads a request's body within bounds: bytes, time, number of values, depth."""

import asyncio
import json
from collections.abc import Callable
from typing import NoReturn

from starlette.requests import Request

from pdserve.errors import InvalidField
from router.openai.errors import HttpRefusal
from router.openai.fields import json_kind

BODY_TIMEOUT_S = 60.0
"""A client that has not sent all of its body by then is refused."""
MAX_BYTES_ON_LOOP = 64 * 1024
"""Longer bodies are parsed in a thread."""
MAX_DEPTH = 32
MAX_VALUES = 1_000_000
"""Commas and brackets: bounds what 16 MiB of `[],[],` would become in memory."""


async def read_json(request: Request, max_bytes: int) -> dict[str, object]:
    """Reads and parses a JSON object.

    Only `application/json` is taken: a browser asks for leave (CORS) before it sends that to
    another origin, so that no web page can use a server on its visitor's loopback.

    Raises:
        HttpRefusal: 408 too slow, 413 too large, 415 another content type.
        InvalidField: no JSON object, or one that is nested too deeply.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpRefusal(
            415, "unsupported_media_type", "the body must be sent as Content-Type: application/json"
        )
    body = await _read_body(request, max_bytes)
    if len(body) <= MAX_BYTES_ON_LOOP:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body, int_of=_read_int)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    too_large = HttpRefusal(413, "body_too_large", f"the body must be at most {max_bytes} bytes")
    announced = request.headers.get("content-length", "")
    # The HTTP parser has refused what is no number.
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise HttpRefusal(
            408, "body_timeout", f"the body did not come within {BODY_TIMEOUT_S:g} s"
        ) from None
    return b"".join(parts)


def parse_object(body: bytes, *, int_of: Callable[[str], int] | None = None) -> dict[str, object]:
    """Parses a JSON object within the bounds of depth and number of values.

    Args:
        body: what the client sent.
        int_of: reads an integer; the parser's own code when None.

    Raises:
        InvalidField: it is none; the field is `body`.
    """
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_values > MAX_VALUES:
        raise InvalidField("body", num_values, f"of at most {MAX_VALUES} values")
    try:
        found: object = json.loads(body, parse_constant=_refuse_constant, parse_int=int_of)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        # Of other errors only Python's limit of the digits of a number speaks for itself.
        is_ours = isinstance(error, json.JSONDecodeError | _NoJson)
        why = str(error)[:100] if is_ours else "a number has too many digits"
        raise InvalidField("body", f"{len(body)} bytes", f"JSON ({why})") from None
    if not isinstance(found, dict):
        raise InvalidField("body", json_kind(found), "a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(found)
    return found


def _check_depth(top: dict[str, object]) -> None:
    level: list[object] = [top]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for one in level:
            values = one.values() if isinstance(one, dict) else one
            assert not isinstance(values, str | bytes)
            inner += [value for value in values if isinstance(value, dict | list)]  # type: ignore[attr-defined]
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> InvalidField:
    return InvalidField("body", "a deeper one", f"nested at most {MAX_DEPTH} levels deep")


def _read_int(text: str) -> int:
    """A Python function, for then the parser, which is C code, lets other threads run at times.

    A list of 131,072 token ids would stop the event loop for 13 to 30 ms, from whichever thread.
    """
    return int(text)


class _NoJson(ValueError):
    """A word that other parsers take for a number."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NoJson(f"{name} is no JSON")
