"""How the demo shows streams that run at once, and where their time went."""

import threading
from collections.abc import Callable, Sequence

from rich.table import Table

from launcher.client import Generation
from pdserve.rpc.v1 import types_pb2

_PIECE_CHARACTERS = 60


class StreamPrinter:
    """Prints several streams line by line, each piece under its stream's label, as it comes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Takes what prints one line; streams may run in threads of their own."""
        self._write = write
        self._pending: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, label: str, text: str) -> None:
        """Takes a piece of text; prints once a line is full, between two words."""
        with self._lock:
            pending = self._pending.get(label, "") + text.replace("\n", " ")
            while len(pending) > _PIECE_CHARACTERS:
                cut = pending.rfind(" ", 1, _PIECE_CHARACTERS)
                cut = _PIECE_CHARACTERS if cut < 0 else cut
                self._print(label, pending[:cut])
                pending = pending[cut:].lstrip(" ")
            self._pending[label] = pending

    def end(self, label: str) -> None:
        """Prints what is left of a stream."""
        with self._lock:
            pending = self._pending.pop(label, "")
            if pending.strip():
                self._print(label, pending)

    def _print(self, label: str, text: str) -> None:
        self._write(f"  {label:>12} | {text.strip()}")


def timeline_table(results: Sequence[tuple[str, Generation]]) -> Table:
    """Draws one column per request from its timeline, one row per figure."""
    # 5 requests fit into 80 columns this way, and 14 figures would not.
    table = Table(
        title="where the time went, and what was shipped",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for label, _ in results:
        table.add_column(label, justify="right", no_wrap=True)
    columns = [_figures(generation) for _, generation in results]
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    return table


def _figures(generation: Generation) -> tuple[tuple[str, str], ...]:
    timeline = generation.timeline or types_pb2.Timeline()
    usage = generation.usage or types_pb2.Usage()
    return (
        ("queue ms", _milliseconds(timeline.queue_s)),
        ("prefill ms", _milliseconds(timeline.prefill_s)),
        ("hand-off ms", _milliseconds(timeline.handoff_s)),
        ("decode ms", _milliseconds(timeline.decode_s)),
        ("TTFT ms", _milliseconds(timeline.ttft_s)),
        ("gap 1-2 ms", _milliseconds(timeline.first_gap_s)),
        ("TPOT ms", _milliseconds(timeline.tpot_s)),
        ("prompt tokens", str(usage.prompt_tokens)),
        ("cached tokens", str(usage.cached_tokens)),
        ("output tokens", str(usage.completion_tokens)),
        ("KV blocks", str(timeline.kv_blocks_shipped)),
        ("KV MiB", f"{timeline.kv_bytes_shipped / 2**20:.1f}"),
        ("prefill worker", timeline.prefill_worker or "none"),
        ("decode worker", timeline.decode_worker or "none"),
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
