"""Does the simulator tell the truth? One small workload, simulated and on a real CPU cluster.

    python -m benchmarks.simulation_truth [--model MODEL] [--output FILE]

Without a model, a tiny one with random weights whose steps are made longer on purpose: 150 ms for a
chunk of 64 prompt tokens, 100 ms for a decode step. So the machine's noise is small against a step,
and what is compared is what the simulator decides: queues, chunks, batches, caches, hand-offs. With
a model, steps take what computing takes.

The laws are fitted first, on the idle cluster, to lone prompts and to small batches; then the
workload is simulated with them, and only then served.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.byte_tokenizer import make_tokenizer
from benchmarks.report import RESULTS, machine, versions
from benchmarks.shapes import TINY
from launcher.local_pool import LocalCluster
from launcher.model_source import resolve_model
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig
from pdserve.predictor.linear_fit import LinearFit
from pdserve.predictor.profile import Profile
from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from simulation.cluster import Cluster
from simulation.generators import Lengths, make_hot_prefix
from simulation.record import Outcome, Record
from simulation.report import GapHistogram, Report, Slo, make_report
from simulation.shape import ClusterRun, ClusterShape
from simulation.workload import Workload

VOCAB_SIZE = 2048
MODEL = TINY | {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PREFILL_STEP_S, DECODE_STEP_S = 0.15, 0.10
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
KV_TOKENS = 16_384
BUDGET = 64
MAX_NUM_SEQS = 16
LONE_PROMPTS = (16, 64, 100, 128, 256, 400)
BATCHES = (1, 2, 4, 8)
BATCH_PROMPT, BATCH_OUTPUT = 64, 16
NUM_REQUESTS, SEED = 160, 11
CONTROL_S = 0.002
GOODPUT_BOUND, LATENCY_BOUND = 0.10, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """When the tokens of one request came."""

    sent_s: float
    at_s: tuple[float, ...]


class Served:
    """A cluster that runs, and its client."""

    def __init__(self, stub: "inference_pb2_grpc.InferenceAsyncStub", vocab_size: int) -> None:
        self._stub = stub
        self._vocab_size = vocab_size

    async def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Runs one request."""
        ids = [10 + token % (self._vocab_size - 10) for token in prompt]
        request = inference_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=ids),
            sampling=types_pb2.SamplingParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True
            ),
        )
        sent_s, at_s = time.monotonic(), []
        async for message in self._stub.Generate(request):
            if message.HasField("chunk"):
                at_s += [time.monotonic()] * len(message.chunk.token_ids)
        assert len(at_s) == num_tokens, f"{len(at_s)} tokens of {num_tokens}"
        return Answer(sent_s=sent_s, at_s=tuple(at_s))


async def fit_laws(served: Served) -> tuple[Profile, float]:
    """Fits a profile on the idle cluster; returns also what a hand-off takes."""
    numbers = random.Random(SEED)
    prefill = LinearFit(3, min_samples=99, half_life_samples=1e9)
    decode = LinearFit(3, min_samples=99, half_life_samples=1e9)

    def draw(count: int) -> list[int]:
        return [numbers.randrange(1 << 20) for _ in range(count)]

    await served.ask(draw(100), 4)
    for length in LONE_PROMPTS * 2:
        answer = await served.ask(draw(length), 1)
        steps = -(-length // BUDGET)
        seconds = answer.at_s[0] - answer.sent_s - 3 * CONTROL_S
        prefill.observe((steps, length, length * length / 2), seconds)
    handovers = []
    for batch in BATCHES:
        prompts = [draw(BATCH_PROMPT) for _ in range(batch)]
        answers = await asyncio.gather(*(served.ask(one, BATCH_OUTPUT) for one in prompts))
        begin_s = max(one.at_s[1] for one in answers)
        end_s = min(one.at_s[-1] for one in answers)
        for one in answers:
            within = [at_s for at_s in one.at_s if begin_s <= at_s <= end_s]
            if len(within) > 2:
                step_s = (within[-1] - within[0]) / (len(within) - 1)
                decode.observe((1, batch, batch * (BATCH_PROMPT + BATCH_OUTPUT / 2)), step_s)
        if batch == 1:
            handovers.append(answers[0].at_s[1] - answers[0].at_s[0])
    for _ in range(4):
        answer = await served.ask(draw(BATCH_PROMPT), 2)
        handovers.append(answer.at_s[1] - answer.at_s[0])
    p0, p1, p2 = prefill.coefficients
    d0, d1, d2 = decode.coefficients
    step_s = decode.predict((1, 1, BATCH_PROMPT))
    profile = Profile(
        worker_class="cpu",
        prefill=(p0, p1, p2),
        decode=(d0, d1, d2),
        transfer=(max(1e-4, statistics.median(handovers) - step_s), 0.0),
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        kv_tokens=KV_TOKENS,
        num_gpus=0,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
    )
    return profile, statistics.median(handovers)


async def serve(served: Served, workload: Workload) -> list[Record]:
    """Sends the workload and returns what came of each request."""
    begin_s = time.monotonic() + 0.1

    async def send(number: int) -> Record:
        arrival = workload.arrivals[number]
        await asyncio.sleep(begin_s + arrival.at_s - time.monotonic())
        answer = await served.ask(arrival.prompt(), arrival.num_output_tokens)
        gaps = len(answer.at_s) - 1
        return Record(
            at_s=answer.sent_s - begin_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=arrival.num_output_tokens,
            cached_tokens=0,
            ttft_s=answer.at_s[0] - answer.sent_s,
            tpot_s=(answer.at_s[-1] - answer.at_s[0]) / gaps if gaps else 0.0,
            hand_over_s=answer.at_s[1] - answer.at_s[0] if gaps else None,
            end_s=answer.at_s[-1] - begin_s,
            attempts=1,
            outcome=Outcome.DONE,
        )

    return list(await asyncio.gather(*map(send, range(len(workload.arrivals)))))


def make_truth_workload(rate_per_s: float) -> Workload:
    """Makes the workload: prompts behind four prefixes, near what the pools can do."""
    return make_hot_prefix(
        NUM_REQUESTS,
        rate_per_s,
        Lengths(mean_prompt_tokens=120, mean_output_tokens=20, spread=0.5),
        SEED,
        num_prefixes=4,
        prefix_tokens=128,
    )


def compare(predicted: Report, measured: Report) -> list[dict[str, object]]:
    """Returns each figure of both sides, and by how much they differ."""
    figures = (
        ("goodput_per_s", predicted.goodput_per_s, measured.goodput_per_s, GOODPUT_BOUND),
        ("ttft_p50_s", predicted.ttft.p50_s, measured.ttft.p50_s, LATENCY_BOUND),
        ("ttft_p99_s", predicted.ttft.p99_s, measured.ttft.p99_s, LATENCY_BOUND),
        ("tpot_p50_s", predicted.tpot.p50_s, measured.tpot.p50_s, LATENCY_BOUND),
        ("tpot_p99_s", predicted.tpot.p99_s, measured.tpot.p99_s, LATENCY_BOUND),
    )
    rows: list[dict[str, object]] = []
    for name, guess, truth, bound in figures:
        assert guess is not None
        assert truth is not None
        error = guess / truth - 1
        rows.append(
            {
                "figure": name,
                "predicted": guess,
                "measured": truth,
                "error": error,
                "bound": bound,
                "holds": abs(error) <= bound,
            }
        )
        print(
            f"{name:14} predicted {guess:8.4f} measured {truth:8.4f} {error:+7.1%} of {bound:.0%}"
        )
    return rows


async def run(cluster: LocalCluster, num_prefill: int, num_decode: int, vocab: int) -> object:
    """Fits, simulates, serves and compares."""
    async with open_channel(cluster.address) as channel:
        served = Served(inference_pb2_grpc.InferenceStub(channel), vocab)
        profile, _ = await fit_laws(served)
        print(
            f"laws: prefill {profile.prefill} decode {profile.decode} hand-off {profile.transfer}"
        )
        # Of a mean prompt, the prefix of which is cached.
        work_s = profile.prefill_s(120, 128) + profile.prefill[0]
        rate_per_s = 0.65 * num_prefill / work_s
        workload = make_truth_workload(rate_per_s)
        # Between two steps: else noise decides on which side those fall that never wait.
        ttft_s = 4.5 * profile.prefill_s(120, 128)
        slo = Slo(ttft_s=ttft_s, tpot_s=2 * profile.decode_step_s(4, 1000))
        shape = ClusterShape(
            prefill=profile,
            decode=profile,
            num_prefill=num_prefill,
            num_decode=num_decode,
            control_s=CONTROL_S,
            router_s=CONTROL_S,
        )
        simulated = Cluster(shape).run(workload)
        predicted = make_report(simulated.records, simulated, slo, 0)
        records = await serve(served, workload)
    seen = ClusterRun(
        records=records, gaps=GapHistogram(), end_s=max(r.end_s or 0 for r in records)
    )
    measured = make_report(records, seen, slo, 0)
    rows = compare(predicted, measured)
    return {
        "profile": asdict(profile),
        "slo": asdict(slo),
        "rate_per_s": rate_per_s,
        "num_requests": NUM_REQUESTS,
        "pools": [num_prefill, num_decode],
        "rows": rows,
        "holds": all(row["holds"] for row in rows),
    }


def main() -> int:
    """Runs it and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="an alias or folder; a tiny one with long steps by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "simulation_truth.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_tiny = options.model is None
        if is_tiny:
            (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
            make_tokenizer(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
        else:
            folder = resolve_model(options.model)
        engine = EngineConfig(
            model=str(folder),
            load_format="dummy" if is_tiny else "auto",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET,
            kv_cache_memory_bytes=KV_TOKENS * KV_BYTES_PER_TOKEN if is_tiny else 512 * 2**20,
        )
        num_prefill, num_decode = (2, 2) if is_tiny else (1, 1)
        config = ClusterConfig(
            engine=engine,
            num_prefill=num_prefill,
            num_decode=num_decode,
            port=0,
            no_http=True,
            prefill_faults=FaultConfig(step_delay_s=PREFILL_STEP_S if is_tiny else 0.0),
            decode_faults=FaultConfig(step_delay_s=DECODE_STEP_S if is_tiny else 0.0),
        )
        with LocalCluster(config) as cluster:
            vocab = VOCAB_SIZE if is_tiny else 40_000
            found = asyncio.run(run(cluster, num_prefill, num_decode, vocab))
    report = {
        "benchmark": "simulation_truth",
        "model": options.model or "tiny, steps made longer: 150 ms prefill, 100 ms decode",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "result": found,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
