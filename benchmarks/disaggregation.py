"""What two pools change for those who are being answered while long prompts arrive.

`python -m benchmarks.disaggregation [interference|turns]`. One prefill and one decode worker
against two colocated ones, one thread each, so the same two cores; without chunks (a prompt is one
step) and with chunks of 256 tokens. Then the multi-turn choice: follow-ups prefilled by the decode
worker that holds the conversation, against a hand-off for each.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.plots import plot_gaps
from benchmarks.processes import percentile
from benchmarks.report import RESULTS, Row, write
from launcher.local_pool import LocalCluster
from launcher.model_source import resolve_model
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2

MODEL = "smollm2-135m"
SEED = 21
NUM_STEADY = 4
STEADY_PROMPT_TOKENS = 64
NUM_ARRIVALS = 5
ARRIVAL_PROMPT_TOKENS = 1000
ARRIVAL_OUTPUT_TOKENS = 8
INTERVAL_SHARE = 1.5
NUM_CONVERSATIONS = 4
FIRST_PROMPT_TOKENS = 500
FIRST_OUTPUT_TOKENS = 32
TURN_TOKENS = 40
LOCAL_TOKENS = 128
WORKLOAD = (
    f"SmolLM2-135M float32; {NUM_STEADY} streams decode steadily while {NUM_ARRIVALS} prompts of "
    f"{ARRIVAL_PROMPT_TOKENS} tokens arrive, one each {INTERVAL_SHARE:g} times "
    f"the TTFT of a lone one ({ARRIVAL_OUTPUT_TOKENS} tokens each), seed {SEED}. Turns: "
    f"{NUM_CONVERSATIONS} conversations of {FIRST_PROMPT_TOKENS} + {FIRST_OUTPUT_TOKENS} tokens, "
    f"followed by {TURN_TOKENS} more, with and without --local-prefill-tokens {LOCAL_TOKENS}"
)


@dataclass
class Stream:
    """When each message of one answer came."""

    sent_s: float
    at_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    timeline: types_pb2.Timeline | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between messages."""
        return [late - early for early, late in zip(self.at_s, self.at_s[1:], strict=False)]


@contextmanager
def cluster_of(num_prefill: int, num_decode: int, **over: int) -> Iterator[LocalCluster]:
    """Runs a cluster of one-thread workers; `over` are a step's token budget and local tokens."""
    engine = EngineConfig(
        model=MODEL,
        max_model_len=4096,
        max_num_batched_tokens=over.get("max_num_batched_tokens", 256),
        kv_cache_memory_bytes=512 * 2**20,
    )
    config = ClusterConfig(
        engine=engine,
        num_prefill=num_prefill,
        num_decode=num_decode,
        local_prefill_tokens=over.get("local_prefill_tokens", 0),
        no_http=True,
        # A prompt that is one step takes longer than a rank may be silent otherwise.
        frozen_after_s=120.0,
    )
    with LocalCluster(replace(config, port=0)) as cluster:
        yield cluster


async def generate(
    stub: "inference_pb2_grpc.InferenceAsyncStub", prompt: Sequence[int], num_tokens: int
) -> Stream:
    """Runs one request."""
    request = inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
    )
    stream = Stream(sent_s=time.monotonic())
    try:
        async for message in stub.Generate(request):
            if message.HasField("chunk"):
                stream.at_s.append(time.monotonic())
                stream.token_ids += message.chunk.token_ids
            else:
                stream.timeline = message.completion.timeline
    except asyncio.CancelledError:
        pass  # a steady stream is over when the arrivals are
    return stream


def make_prompt(numbers: random.Random, num_tokens: int) -> list[int]:
    """Draws a prompt that nobody has cached."""
    return [numbers.randrange(100, 49_000) for _ in range(num_tokens)]


async def lone_ttft_s(address: str) -> float:
    """Returns how long a prompt takes when nothing else runs: what the machine can do."""
    numbers = random.Random(SEED + 1)
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(2):
            stream = await generate(stub, make_prompt(numbers, ARRIVAL_PROMPT_TOKENS), 1)
    return stream.at_s[0] - stream.sent_s


async def interfere(address: str, interval_s: float) -> tuple[list[Stream], list[Stream]]:
    """Runs steady streams and arrivals; returns both, the steady ones cut to the arrivals' time."""
    numbers = random.Random(SEED)
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        steady = [
            asyncio.create_task(generate(stub, make_prompt(numbers, STEADY_PROMPT_TOKENS), 3000))
            for _ in range(NUM_STEADY)
        ]
        await asyncio.sleep(4.0)
        begin_s = time.monotonic()
        arrivals = []
        for _ in range(NUM_ARRIVALS):
            prompt = make_prompt(numbers, ARRIVAL_PROMPT_TOKENS)
            arrivals.append(asyncio.create_task(generate(stub, prompt, ARRIVAL_OUTPUT_TOKENS)))
            await asyncio.sleep(interval_s)
        done = list(await asyncio.gather(*arrivals))
        for task in steady:
            task.cancel()
        streams = list(await asyncio.gather(*steady))
    for stream in streams:
        stream.at_s = [at_s for at_s in stream.at_s if at_s >= begin_s]
    return streams, done


def rows_of(name: str, steady: list[Stream], arrivals: list[Stream]) -> list[Row]:
    """Sums one configuration up."""
    gaps_s = [gap for stream in steady for gap in stream.gaps_s]
    ttfts_s = [stream.at_s[0] - stream.sent_s for stream in arrivals]
    first_gaps_s = [stream.gaps_s[0] for stream in arrivals]
    figures = {
        "steady ITL p50": percentile(gaps_s, 0.5),
        "steady ITL p99": percentile(gaps_s, 0.99),
        "steady ITL max": max(gaps_s),
        "TTFT of arrivals p50": statistics.median(ttfts_s),
        "TTFT of arrivals max": max(ttfts_s),
        "gap 1-2 of arrivals p50": statistics.median(first_gaps_s),
        "gap 1-2 of arrivals max": max(first_gaps_s),
    }
    rows = [
        Row(name=f"{name}: {what}", value=1e3 * seconds, unit="ms")
        for what, seconds in figures.items()
    ]
    num_tokens = sum(len(stream.at_s) for stream in steady)
    rows.append(
        Row(name=f"{name}: steady tokens", value=num_tokens, unit="tokens", better="higher")
    )
    return rows


def measure_interference() -> list[Row]:
    """Measures four configurations and plots their gaps."""
    with cluster_of(1, 1, max_num_batched_tokens=2048) as cluster:
        interval_s = INTERVAL_SHARE * asyncio.run(lone_ttft_s(cluster.address))
    rows = [Row(name="interval of arrivals", value=interval_s, unit="s")]
    gaps_by_name: dict[str, list[list[tuple[float, float]]]] = {}
    for name, num_prefill, num_decode, budget in (
        ("1P1D, no chunks", 1, 1, 2048),
        ("2 colocated, no chunks", 0, 2, 2048),
        ("1P1D, chunks of 256", 1, 1, 256),
        ("2 colocated, chunks of 256", 0, 2, 256),
    ):
        with cluster_of(num_prefill, num_decode, max_num_batched_tokens=budget) as cluster:
            steady, arrivals = asyncio.run(interfere(cluster.address, interval_s))
        rows += rows_of(name, steady, arrivals)
        begin_s = arrivals[0].sent_s
        gaps_by_name[name] = [
            [
                (at_s - begin_s, 1e3 * gap_s)
                for at_s, gap_s in zip(stream.at_s[1:], stream.gaps_s, strict=True)
            ]
            for stream in steady
        ]
        for row in rows[-8:]:
            print(f"{row.name:<50} {row.value:8.1f} {row.unit}", flush=True)
    sent_s = [number * interval_s for number in range(NUM_ARRIVALS)]
    plot_gaps(RESULTS / "disaggregation.png", gaps_by_name, sent_s)
    return rows


async def converse(address: str) -> tuple[list[float], list[float], list[int]]:
    """Runs conversations; returns both turns' TTFT and the prompt tokens prefilled by decode."""
    numbers = random.Random(SEED)
    first_s, second_s, local_tokens = [], [], []
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await generate(stub, make_prompt(numbers, 64), 4)
        for _ in range(NUM_CONVERSATIONS):
            prompt = make_prompt(numbers, FIRST_PROMPT_TOKENS)
            first = await generate(stub, prompt, FIRST_OUTPUT_TOKENS)
            follow_up = [*prompt, *first.token_ids, *make_prompt(numbers, TURN_TOKENS)]
            second = await generate(stub, follow_up, 8)
            first_s.append(first.at_s[0] - first.sent_s)
            second_s.append(second.at_s[0] - second.sent_s)
            assert second.timeline is not None
            local_tokens.append(second.timeline.local_prefill_tokens)
    return first_s, second_s, local_tokens


def measure_turns() -> list[Row]:
    """Measures follow-ups with and without local prefill."""
    rows = []
    for name, limit in (("handed off", 0), ("prefilled by decode", LOCAL_TOKENS)):
        with cluster_of(1, 1, local_prefill_tokens=limit) as cluster:
            first_s, second_s, local_tokens = asyncio.run(converse(cluster.address))
        rows.append(
            Row(
                name=f"follow-up {name}: TTFT p50",
                value=1e3 * statistics.median(second_s),
                unit="ms",
                details={
                    "follow_ups_ms": [round(1e3 * one, 1) for one in second_s],
                    "first_turns_ms": [round(1e3 * one, 1) for one in first_s],
                    "local_prefill_tokens": local_tokens,
                },
            )
        )
    return rows


def main() -> None:
    """Measures what the command line names, or both."""
    resolve_model(MODEL)
    parts = {"interference": measure_interference, "turns": measure_turns}
    names = [name for name in parts if name in sys.argv[1:]] or list(parts)
    rows = [row for name in names for row in parts[name]()]
    suffix = "" if len(names) == len(parts) else f"-{names[0]}"
    write(f"disaggregation{suffix}", WORKLOAD, rows)


if __name__ == "__main__":
    main()
