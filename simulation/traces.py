"""Reads published traces of requests, plain or gzipped, from a path that the user gives.

Mooncake (kvcache-ai/Mooncake, FAST25-release): a JSON object a line with `timestamp` in ms,
`input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt, where equal
ids at the beginning mean a shared prefix.

Azure (Azure/AzurePublicDataset, LLM inference 2023 and 2024): CSV with `TIMESTAMP`,
`ContextTokens` and `GeneratedTokens`; it says nothing of prefixes, so nothing is shared.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TextIO

from pdserve.errors import ConfigError
from simulation.workload import Arrival, Piece, Workload, make_workload

MOONCAKE_BLOCK_TOKENS = 512
_MAX_CONTENT = 2**31


def read_trace(path: Path) -> Workload:
    """Reads a trace; which format it has is seen from its first line, and time begins with it.

    Raises:
        ConfigError: the file cannot be read, or a line is of neither format.
    """
    arrivals: list[Arrival] = []
    try:
        with _open_text(path) as lines:
            first = lines.readline()
            if not first.strip():
                raise ConfigError(f"trace {path} is empty", settings=("trace",))
            read = _read_mooncake if first.lstrip().startswith("{") else _read_azure
            arrivals.extend(read(first, lines))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}", settings=("trace",)) from error
    except (ValueError, KeyError, TypeError) as error:
        number = len(arrivals) + 1
        raise ConfigError(
            f"trace {path}, request {number}, is of another format: {error}", settings=("trace",)
        ) from error
    if not arrivals:
        raise ConfigError(f"trace {path} has no request", settings=("trace",))
    start_s = min(one.at_s for one in arrivals)
    since = [replace(one, at_s=one.at_s - start_s) for one in arrivals]
    return make_workload(path.name.split(".")[0], since)


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _read_mooncake(first: str, rest: Iterable[str]) -> Iterator[Arrival]:
    for line in chain((first,), rest):
        if not line.strip():
            continue
        row = json.loads(line)
        hash_ids = row["hash_ids"]
        if not isinstance(hash_ids, list):
            raise ValueError("hash_ids is no list")
        at_s = float(str(row["timestamp"])) / 1000
        num_tokens, num_output = int(str(row["input_length"])), int(str(row["output_length"]))
        yield Arrival(
            at_s=at_s,
            pieces=_pieces(num_tokens, [int(one) for one in hash_ids]),
            num_output_tokens=max(1, num_output),
        )


def _pieces(num_tokens: int, hash_ids: list[int]) -> tuple[Piece, ...]:
    if num_tokens < 1 or not hash_ids:
        raise ValueError(f"a prompt of {num_tokens} tokens in {len(hash_ids)} blocks")
    pieces = []
    for hash_id in hash_ids:
        if not 0 <= hash_id < _MAX_CONTENT:
            raise ValueError(f"hash id {hash_id} is out of range")
        size = min(MOONCAKE_BLOCK_TOKENS, num_tokens)
        if size > 0:
            pieces.append(Piece(hash_id, size))
        num_tokens -= size
    if num_tokens > 0:
        # Some lines have fewer ids than blocks: the rest goes on as the last one.
        pieces[-1] = Piece(pieces[-1].content, pieces[-1].num_tokens + num_tokens)
    return tuple(pieces)


def _read_azure(first: str, lines: Iterable[str]) -> Iterator[Arrival]:
    names = [name.strip() for name in first.split(",")]
    for number, row in enumerate(csv.DictReader(lines, names)):
        num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        if num_prompt < 1:
            raise ValueError(f"a prompt of {num_prompt} tokens")
        yield Arrival(
            at_s=_seconds(row["TIMESTAMP"].strip()),
            pieces=(Piece(number, num_prompt),),
            num_output_tokens=max(1, num_output),
        )


def _seconds(stamp: str) -> float:
    """Reads a time of day with any number of digits behind the point, which is UTC."""
    head, _, fraction = stamp.removesuffix("Z").partition(".")
    head = head.removesuffix("+00:00")
    fraction = fraction.removesuffix("+00:00")
    return datetime.fromisoformat(head + "+00:00").timestamp() + float(f"0.{fraction or 0}")
