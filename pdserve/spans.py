"""Where the time of requests goes inside of a worker: spans, written down for whoever asks.

Off by default. One JSON object a line; times are of the monotonic clock, which all processes of a
machine share, so files of several workers and a client's own times fit together.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

Detail = str | int | list[str]


class SpanLog(Protocol):
    """Takes spans. Called from any thread."""

    def note(self, name: str, start_s: float, end_s: float, **details: Detail) -> None:
        """Notes something that took time, or with two equal times something that happened."""
        ...


class SpanFile:
    """Appends spans to a file, each at once: the process may be killed."""

    def __init__(self, folder: Path, process: str) -> None:
        """Opens `folder/process.jsonl`; the folder is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        self._process = process
        self._file: TextIO = (folder / f"{process}.jsonl").open("a", buffering=1, encoding="utf-8")

    def note(self, name: str, start_s: float, end_s: float, **details: Detail) -> None:
        """Writes a line."""
        span: Mapping[str, object] = {
            "process": self._process,
            "name": name,
            "start_s": start_s,
            "end_s": end_s,
            **details,
        }
        self._file.write(json.dumps(span) + "\n")
