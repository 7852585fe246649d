"""Runs a cluster in the foreground, from its first line to its last, until a signal ends it."""

import signal
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from types import FrameType

from launcher.local_pool import LocalCluster
from pdserve import line_output
from pdserve.request import Role

EXIT_FORCED = 1
"""The user asked for it, but requests were cut."""


def run_until_signal(cluster: LocalCluster, scaled: AbstractContextManager[object]) -> int:
    """Runs a cluster to its end: the first SIGTERM or SIGINT drains it, the second kills it."""
    num_signals = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        cluster.request_stop(now=num_signals > 1)

    started_s = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    cluster.launch()
    try:
        with ExitStack() as stack:
            if cluster.wait_ready():
                for line in describe(cluster):
                    write_line(line)
                listening = f"grpc {cluster.address}"
                if cluster.http_address is not None:
                    listening += f", http http://{cluster.http_address}"
                write_line(f"ready after {time.monotonic() - started_s:.1f} s: {listening}")
                stack.enter_context(scaled)
            cluster.wait()
    finally:
        cluster.stop(now=True)
    if num_signals > 1:
        write_line("stopped at once; requests that still ran were cut")
        return EXIT_FORCED
    write_line("stopped")
    return 0


def describe(cluster: LocalCluster) -> list[str]:
    """Says what each pool can hold and where everything listens."""
    lines = [f"cluster {cluster.name} (as --cluster of scale takes it)"]
    for role in (Role.PREFILL, Role.DECODE):
        records = [m.record for m in cluster.members() if m.role is role and m.record is not None]
        if records:
            tokens = sum(record.total_blocks * record.block_size for record in records)
            addresses = ", ".join(f"{record.worker_id} {record.address}" for record in records)
            lines.append(f"{role}: {len(records)} x, KV for {tokens:,} tokens ({addresses})")
    lines.append(f"metrics http://{cluster.metrics_address}/metrics")
    return lines


def write_line(line: str) -> None:
    """Writes one line to stderr; stdout stays free."""
    line_output.write_line(sys.stderr, line)
