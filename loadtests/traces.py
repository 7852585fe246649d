"""Requests of a published trace, to be sent when they were sent then.

Mooncake: a JSON object a line; `timestamp` in ms, lengths in tokens, and an id for each 512 tokens
of the prompt: equal ids are equal tokens. Azure: CSV without ids, so nothing is shared.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from loadtests.sessions import Sizes, make_ids

_BLOCK_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRequest:
    """One line."""

    at_s: float
    """Since the first request."""
    blocks: tuple[str, ...]
    """A name for each 512 tokens of the prompt."""
    prompt_tokens: int
    output_tokens: int


class TraceError(ValueError):
    """The file is no trace."""


def read_trace(path: Path) -> Iterator[TracedRequest]:
    """Reads a trace, gzipped or not, line by line; which format it has is seen from its start.

    Raises:
        TraceError: a line has another format.
        OSError: the file cannot be read.
    """
    with _open_text(path) as lines:
        first = lines.readline()
        rows = _read_json(first, lines) if first.startswith("{") else _read_csv(first, lines)
        start_s: float | None = None
        number = 0
        try:
            for stamp_s, request in rows:
                number += 1
                start_s = stamp_s if start_s is None else start_s
                yield TracedRequest(
                    at_s=max(0.0, stamp_s - start_s),
                    blocks=request.blocks,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, request {number + 1}: {error!r}") from error


def fit_prompt(request: TracedRequest, sizes: Sizes, scale: float) -> tuple[int, ...]:
    """Returns a prompt of that length times `scale`, at most what the model takes.

    What was shared in the trace is shared here: each block shrinks by itself.
    """
    whole = max(1, min(round(request.prompt_tokens * scale), sizes.max_prompt_tokens))
    block_tokens = max(1, round(_BLOCK_TOKENS * scale))
    ids: list[int] = []
    for name in request.blocks:
        ids += make_ids(name, block_tokens, sizes)
        if len(ids) >= whole:
            break
    if len(ids) < whole:
        ids += make_ids(f"rest of {request.blocks[-1]}", whole - len(ids), sizes)
    return tuple(ids[:whole])


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _read_json(first: str, rest: Iterable[str]) -> Iterator[tuple[float, TracedRequest]]:
    yield _from_json(first)
    for line in rest:
        if line.strip():
            yield _from_json(line)


def _from_json(line: str) -> tuple[float, TracedRequest]:
    row = json.loads(line)
    request = TracedRequest(
        at_s=0.0,
        blocks=tuple(f"block-{int(one)}" for one in row["hash_ids"]),
        prompt_tokens=int(row["input_length"]),
        output_tokens=max(1, int(row["output_length"])),
    )
    if not request.blocks:
        raise ValueError("hash_ids is empty")
    return float(row["timestamp"]) / 1000.0, request


def _read_csv(first: str, rest: Iterable[str]) -> Iterator[tuple[float, TracedRequest]]:
    names = [name.strip() for name in first.split(",")]
    for number, row in enumerate(csv.DictReader(rest, names)):
        # Seven digits of a second are one more than Python takes.
        whole, _, fraction = row["TIMESTAMP"].strip().partition(".")
        stamp_s = datetime.fromisoformat(f"{whole}+00:00").timestamp()
        stamp_s += float(f"0.{fraction or 0}")
        request = TracedRequest(
            at_s=0.0,
            blocks=(f"azure-{number}",),
            prompt_tokens=int(row["ContextTokens"]),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )
        yield stamp_s, request
