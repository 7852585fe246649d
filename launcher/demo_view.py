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
    """Draws one line per request from its timeline."""
    # 78 columns: the narrowest terminals have 80.
    table = Table(
        title="where the time went (ms), and what was shipped",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("request", no_wrap=True)
    for name in ("prompt", "cached", "out", "TTFT", "hand-off", "TPOT", "KV MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("path", no_wrap=True)
    for label, generation in results:
        timeline = generation.timeline or types_pb2.Timeline()
        usage = generation.usage or types_pb2.Usage()
        table.add_row(
            label,
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.completion_tokens),
            _milliseconds(timeline.ttft_s),
            _milliseconds(timeline.handoff_s),
            _milliseconds(timeline.tpot_s),
            f"{timeline.kv_bytes_shipped / 2**20:.1f}",
            f"{timeline.prefill_worker or 'local'} > {timeline.decode_worker or 'none'}",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
