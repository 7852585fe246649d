"""Reads published traces of requests, plain or gzipped, from a path that the user gives.

Mooncake (kvcache-ai/Mooncake, FAST25-release): a JSON object a line with `timestamp` in ms,
`input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt, where equal
ids at the beginning mean a shared prefix.

Azure (Azure/AzurePublicDataset, LLM inference 2023 and 2024): CSV with `TIMESTAMP`,
`ContextTokens` and `GeneratedTokens`; it says nothing of prefixes, so nothing is shared.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path

from pdserve.errors import ConfigError
from simulation.trace_lines import TraceLine, read_lines
from simulation.workload import Arrival, Piece, Workload, make_workload

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path) -> Workload:
    """Reads a trace; which format it has is seen from its first line, and time begins with it.

    Raises:
        ConfigError: the file cannot be read, or a line is of neither format; the text names the
            line and the field.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"trace {path} is empty", settings=("trace",))
    if first.text.startswith("{"):
        arrivals = [_read_mooncake(line) for line in chain((first,), lines)]
    else:
        arrivals = list(_read_azure(first, lines))
    if not arrivals:
        raise ConfigError(f"trace {path} has no request behind its header", settings=("trace",))
    start_s = min(one.at_s for one in arrivals)
    since = [replace(one, at_s=one.at_s - start_s) for one in arrivals]
    return make_workload(path.name.split(".")[0], since)


def _read_mooncake(line: TraceLine) -> Arrival:
    row = line.read_object()
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        if field not in row:
            raise line.refuse(f"{field} is missing")
    hash_ids = row["hash_ids"]
    if not isinstance(hash_ids, list) or not hash_ids:
        raise line.refuse_value("hash_ids", "a list of at least one number", hash_ids)
    num_tokens = line.read_count("input_length", row["input_length"], least=1)
    contents = [line.read_count("each of hash_ids", one) for one in hash_ids]
    return Arrival(
        at_s=line.read_time_s("timestamp", row["timestamp"], per_s=1000),
        pieces=_pieces(num_tokens, contents),
        num_output_tokens=max(1, line.read_count("output_length", row["output_length"])),
    )


def _pieces(num_tokens: int, hash_ids: list[int]) -> tuple[Piece, ...]:
    pieces = []
    for hash_id in hash_ids:
        size = min(MOONCAKE_BLOCK_TOKENS, num_tokens)
        if size > 0:
            pieces.append(Piece(hash_id, size))
        num_tokens -= size
    if num_tokens > 0:
        # Some lines have fewer ids than blocks: the rest goes on as the last one.
        pieces[-1] = Piece(pieces[-1].content, pieces[-1].num_tokens + num_tokens)
    return tuple(pieces)


def _read_azure(header: TraceLine, lines: Iterable[TraceLine]) -> Iterator[Arrival]:
    names = [name.strip() for name in _split(header)]
    if not set(AZURE_COLUMNS) <= set(names):
        wanted = f"a JSON object (Mooncake) or have the columns {','.join(AZURE_COLUMNS)} (Azure)"
        raise header.refuse_value("it", wanted, header.text)
    columns = [(name, names.index(name)) for name in AZURE_COLUMNS]
    for number, line in enumerate(lines):
        fields = _split(line)
        for name, index in columns:
            if index >= len(fields):
                raise line.refuse(f"{name} is missing")
        stamp, num_prompt, num_output = (fields[index] for _, index in columns)
        num_tokens = line.read_text_count("ContextTokens", num_prompt, least=1)
        yield Arrival(
            at_s=_seconds(line, stamp.strip()),
            pieces=(Piece(number, num_tokens),),
            num_output_tokens=max(1, line.read_text_count("GeneratedTokens", num_output)),
        )


def _split(line: TraceLine) -> list[str]:
    try:
        return next(csv.reader((line.text,)))
    except csv.Error:
        raise line.refuse_value("it", "a line of CSV", line.text) from None


def _seconds(line: TraceLine, stamp: str) -> float:
    """Reads a time of day with any number of digits behind the point, which is UTC."""
    head, point, fraction = stamp.removesuffix("Z").partition(".")
    head = head.removesuffix("+00:00")
    fraction = fraction.removesuffix("+00:00")
    try:
        whole_s = datetime.fromisoformat(head + "+00:00").timestamp()
    except ValueError:
        whole_s = None
    if whole_s is None or (point and not (fraction.isascii() and fraction.isdigit())):
        raise line.refuse_value("TIMESTAMP", "a time like 2023-11-16 18:15:46.68 (UTC)", stamp)
    return whole_s + float(f"0.{fraction or 0}")
