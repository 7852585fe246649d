"""Clusters of unlike pools under load, for `four_gpus`: figures, tokens, hand-offs, a kill."""

import os
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.four_scale import Load, Scale
from benchmarks.processes import percentile
from benchmarks.serving_cluster import LoadClient
from benchmarks.serving_figures import make_figures
from benchmarks.serving_load import Answered, LoadPoint
from launcher.local_pool import LocalCluster
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig
from simulation.journey import Outcome, Record

Row = dict[str, object]
START_TIMEOUT_S = 240.0
NUM_WARM = 3
HEARTBEATS_S = 1.5
"""After so long a worker's counters tell of its last hand-off."""
_SCRAPE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Replicas of both pools, and the tensor ranks of each."""

    num_prefill: int
    num_decode: int
    prefill_tensor: int = 1
    decode_tensor: int = 1

    @property
    def num_gpus(self) -> int:
        """That all ranks take."""
        return self.num_prefill * self.prefill_tensor + self.num_decode * self.decode_tensor

    def __str__(self) -> str:
        """As in `2P TP1 + 1D TP2`."""
        prefill = f"{self.num_prefill}P TP{self.prefill_tensor} + " if self.num_prefill else ""
        return f"{prefill}{self.num_decode}D TP{self.decode_tensor}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStand:
    """A running cluster and its client."""

    cluster: LocalCluster
    client: LoadClient
    scale: Scale

    def run(self, load: Load, rate_per_s: float, seed: int) -> tuple[Answered, ...]:
        """Sends a load at a rate for as long as the scale says."""
        count = max(4, round(rate_per_s * self.scale.seconds))
        return self.client.run(make_point(self.scale, load, rate_per_s, count, seed)).answered

    def prefill_counters(self) -> dict[str, float]:
        """Returns the counters of all prefill workers, which time the hand-offs, summed."""
        total: dict[str, float] = {}
        for member in self.cluster.members():
            if member.record is None or not member.worker_id.startswith("prefill"):
                continue
            url = f"http://{member.record.metrics_address}/metrics"
            with urllib.request.urlopen(url, timeout=_SCRAPE_TIMEOUT_S) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            for sample in (one for family in families for one in family.samples):
                total[sample.name] = total.get(sample.name, 0.0) + sample.value
        return total


def make_point(
    scale: Scale, load: Load, rate_per_s: float | None, num_requests: int, seed: int
) -> LoadPoint:
    """Says what the client sends."""
    return LoadPoint(
        num_requests=num_requests,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        rate_per_s=rate_per_s,
        seed=seed,
        end_id=scale.end_id,
    )


@contextmanager
def running_pools(
    scale: Scale,
    folder: Path,
    pools: Pools,
    engine: EngineConfig,
    *,
    decode_faults: FaultConfig | None = None,
) -> Iterator[PoolStand]:
    """Starts a cluster and warms it up; what it said is shown if anything fails."""
    lines: list[str] = []
    config = ClusterConfig(
        engine=replace(engine, model=str(folder), tensor_parallel=pools.prefill_tensor),
        num_prefill=pools.num_prefill,
        num_decode=pools.num_decode,
        decode_tensor_parallel=pools.decode_tensor,
        port=0,
        http_port=0,
        log_level="warning",
        ready_timeout_s=START_TIMEOUT_S,
        decode_faults=decode_faults or FaultConfig(),
    )
    started_s = time.monotonic()
    cluster = LocalCluster(config, report=lines.append)
    try:
        cluster.start()
        print(f"{pools}: ready in {time.monotonic() - started_s:.1f} s", flush=True)
        assert cluster.http_address is not None
        client = LoadClient(cluster.http_address, os.getpid())
        try:
            stand = PoolStand(cluster=cluster, client=client, scale=scale)
            client.run(make_point(scale, scale.exact_load, None, NUM_WARM, 7))
            yield stand
        finally:
            client.close()
    except BaseException:
        print("\n".join(lines[-40:]), flush=True)
        raise
    finally:
        cluster.stop()


def measure_load(stand: PoolStand, pools: Pools, load: Load, rate_per_s: float) -> Row:
    """Returns what clients saw at a rate, how many kept the objectives, and the hand-offs."""
    before = stand.prefill_counters()
    answered = stand.run(load, rate_per_s, seed=round(1000 * rate_per_s))
    time.sleep(HEARTBEATS_S)
    after = stand.prefill_counters()
    row: Row = {"bench": f"online {load.name}", "pools": str(pools), "offered_per_s": rate_per_s}
    records = make_records(answered, load.output_tokens)
    row |= {"goodput_per_s": goodput(records, load), "slo": asdict(load.slo)}
    try:
        row |= asdict(make_figures(answered, load.output_tokens))
    except ValueError as error:
        row["error"] = str(error)
    moved, seconds = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("pdserve_handoff_bytes_total", "pdserve_handoff_seconds_total")
    )
    if seconds:
        row["handoff_gb_per_s"] = moved / seconds / 1e9
    show_load(row)
    return row


def show_load(row: Row) -> None:
    """Prints a row in a line."""
    spreads = [
        f"{name} {row[name]['p50_ms']:.1f}/{row[name]['p99_ms']:.1f}"  # type: ignore[index]  # of asdict
        for name in ("ttft", "tpot")
        if name in row
    ]
    print(
        f"{row['pools']}  {row['bench']} at {row['offered_per_s']:g}/s: goodput "
        f"{row['goodput_per_s']:.2f}, {', '.join(spreads)}, {row.get('num_failed')} failed, "
        f"hand-off {row.get('handoff_gb_per_s', 0.0):.3f} GB/s",
        flush=True,
    )


def make_records(answered: Sequence[Answered], output_tokens: int) -> list[Record]:
    """Tells of real requests as the simulator tells of its own."""
    begin_s = min(one.sent_s for one in answered)
    records = []
    for one in answered:
        is_done = sum(one.num_tokens) == output_tokens and one.error is None
        gaps = output_tokens - 1
        records.append(
            Record(
                at_s=one.sent_s - begin_s,
                num_prompt_tokens=0,
                num_output_tokens=output_tokens,
                cached_tokens=0,
                ttft_s=one.at_s[0] - one.sent_s if is_done else None,
                tpot_s=(one.at_s[-1] - one.at_s[0]) / gaps if is_done else None,
                hand_over_s=None,
                end_s=one.at_s[-1] - begin_s if is_done else None,
                attempts=1,
                outcome=Outcome.DONE if is_done else Outcome.FAILED,
            )
        )
    return records


def goodput(records: Sequence[Record], load: Load) -> float:
    """Returns requests that kept both objectives, for each second of arrivals."""
    arrivals_s = [one.at_s for one in records]
    duration_s = max(arrivals_s) - min(arrivals_s)
    return sum(load.slo.is_met(one) for one in records) / max(duration_s, 1e-9)


def tokens_of(stand: PoolStand, load: Load, num_requests: int, seed: int) -> list[list[int]]:
    """Returns the tokens of requests that run at once."""
    rate_per_s = load.rates_per_s[0]
    point = make_point(stand.scale, load, rate_per_s, num_requests, seed)
    return [one.token_ids for one in stand.client.run(point).answered]


def kill_figures(
    answered: Sequence[Answered], killed_s: float, expected: Sequence[Sequence[int]] | None
) -> Row:
    """Sums up what the kill of a worker did to those that were under way.

    Args:
        answered: all requests of the run.
        killed_s: when, on the monotonic clock.
        expected: tokens of the same requests undisturbed; None: not compared.
    """
    num_lost = sum(one.error is not None for one in answered)
    stalls, others = [], []
    for one in answered:
        if not one.at_s or not one.sent_s <= killed_s <= one.at_s[-1]:
            continue
        at_s = [one.sent_s, *one.at_s]
        gaps = list(pairwise(at_s))
        over_kill = next(late - early for early, late in gaps if early <= killed_s <= late)
        rest = [late - early for early, late in gaps[1:] if not early <= killed_s <= late]
        # Whoever had tokens before and waited long over the kill was on the worker that died.
        if one.at_s[0] < killed_s and rest and over_kill > 5 * max(percentile(rest, 0.9), 0.01):
            stalls.append(over_kill)
        else:
            others += rest
    wrong = None
    if expected is not None:
        wrong = sum(list(ids) != one.token_ids for ids, one in zip(expected, answered, strict=True))
    return {
        "num_requests": len(answered),
        "requests_lost": num_lost,
        "requests_with_wrong_tokens": wrong,
        "requests_affected": len(stalls),
        "stall_p50_ms": 1e3 * statistics.median(stalls) if stalls else None,
        "stall_max_ms": 1e3 * max(stalls) if stalls else None,
        "others_itl_p99_ms": 1e3 * percentile(others, 0.99) if others else None,
    }
