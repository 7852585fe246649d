"""How prompts are best cut into frames that leave while later layers are computed.

`python -m benchmarks.handoff_sweep [--variants a;b]`; needs two GPUs, three minutes. With
`--decode-gpu 0` both ends share one: that shows that it works, and no figure of a link.

One engine computes streams of prompts of Llama-3-8B's shape, alone and with their KV handed off to
another GPU, once for each way to cut and to pack. Told are what streaming costs prefill, and how
long after the end of its prompt the last of its KV is scattered: in a stream, and of a lone prompt.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_engine import Bench
from benchmarks.gpu_handoff import Answer, read_line, write_line
from benchmarks.handoff_ends import INCARNATIONS, PrefillEnd, Setting
from benchmarks.handoff_order import Order
from benchmarks.report import RESULTS, write_gpu
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.transport import LinkPeer
from pdserve.config.worker import HandoffConfig
from pdserve.cuda.runner import CudaRunner
from pdserve.rank.startup import SWITCH_INTERVAL_S
from pdserve.request import Role, WorkerId

MARK_LAYERS = 4
NUM_ROUNDS, NUM_LONE, NUM_STARTING = 2, 6, 3
STREAM_S = 0.9
"""About as long is each stream: at 2,048 tokens, 19 prompts."""
SECONDS_PER_TOKEN = 23e-6
ALL_LAYERS = 1000
Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to hand prompts off."""

    name: str
    handoff: dict[str, object] = field(default_factory=dict)
    leaves_early: bool = True
    lengths: tuple[int, ...] = (2048,)


def layers(count: int, **more: object) -> dict[str, object]:
    """Returns settings that cut prompts of any length into groups of layers."""
    return {"frame_layers": count, "layered_from_tokens": 1, **more}


SHORT = (512, 768, 1024)
VARIANTS = (
    Variant(name="after the step", handoff=layers(ALL_LAYERS), leaves_early=False),
    Variant(name="8 layers", handoff=layers(8)),
    Variant(name="32 layers", handoff=layers(ALL_LAYERS)),
    Variant(name="4 layers", handoff=layers(4)),
    Variant(name="8, 32 programs", handoff=layers(8, pack_programs=32)),
    Variant(name="8, 16 programs", handoff=layers(8, pack_programs=16)),
    Variant(name="short, 32", handoff=layers(ALL_LAYERS), lengths=SHORT),
    Variant(name="short, 8", handoff=layers(8), lengths=SHORT),
    Variant(name="short, after", handoff=layers(ALL_LAYERS), leaves_early=False, lengths=SHORT),
    Variant(name="16 layers", handoff=layers(16)),
    Variant(name="8, no sums", handoff=layers(8, has_checksums=False)),
    Variant(name="8, nccl", handoff=layers(8, transports=["nccl"])),
)
"""What matters most comes first: time may end."""


def settings_of(variant: Variant) -> dict[str, object]:
    """Returns the fields of `HandoffConfig`."""
    return {"transports": ["push"], **variant.handoff}


def start_decode(variant: Variant, gpu: str) -> subprocess.Popen[str]:
    """Starts a decode end on a GPU."""
    settings = json.dumps(settings_of(variant))
    return subprocess.Popen(
        (sys.executable, "-m", "benchmarks.handoff_ends", "decode", "--handoff", settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"},
    )


def stop(process: subprocess.Popen[str]) -> None:
    """Lets a decode end go."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()


class Sweep:
    """One variant after another over one engine."""

    def __init__(self, bench: Bench) -> None:
        """Keeps it; it stays loaded."""
        self.rows: list[Row] = []
        self._bench = bench
        runner = bench.stand.runner
        assert isinstance(runner, CudaRunner)
        self._runner, self._marks = runner, runner.marks

    def measure(self, variant: Variant, decode: subprocess.Popen[str]) -> None:
        """Measures a variant at all its lengths."""
        told = json.loads(json.dumps(read_line(decode)))
        endpoint = LinkEndpoint(
            host=told["host"], port=told["port"], token=bytes.fromhex(told["token"])
        )
        peer = LinkPeer(
            worker_id=WorkerId("decode-0"),
            incarnation=INCARNATIONS[Role.DECODE],
            endpoint=endpoint,
        )
        fields = settings_of(variant)
        transports = fields["transports"]
        assert isinstance(transports, list)
        handoff = HandoffConfig(**{**fields, "transports": tuple(transports)})  # type: ignore[arg-type]
        setting = Setting(handoff=handoff, is_trial=False, leaves_early=variant.leaves_early)
        self._runner.marks = self._marks if variant.leaves_early else None
        prefill = PrefillEnd(setting, peer, self._bench)
        try:
            for length in variant.lengths:
                self._measure(variant, length, prefill, decode)
        finally:
            prefill.close()

    def _measure(
        self, variant: Variant, length: int, prefill: PrefillEnd, decode: subprocess.Popen[str]
    ) -> None:
        def run(**order: int | bool) -> tuple[Answer, Answer]:
            one = Order(num_tokens=length, computes=True, **order)  # type: ignore[arg-type]
            if one.ships:
                write_line(decode, json.dumps(asdict(one)))
                read_line(decode)
            sent = prefill.run(one)
            return sent, read_line(decode) if one.ships else {}  # type: ignore[return-value]

        run(seed=1, num_handoffs=3)
        sent, landed = run(seed=2, has_sum=True)
        if sent["sum"] != landed["sum"]:
            raise RuntimeError(f"KV was computed as {sent['sum']}, got {landed['sum']}")
        periods: dict[bool, list[float]] = {True: [], False: []}
        waits_ms: list[float] = []
        num_prompts = max(8, round(STREAM_S / (length * SECONDS_PER_TOKEN)))
        for number in range(NUM_ROUNDS):
            for ships in (False, True):
                sent, landed = run(seed=10 + number, num_handoffs=num_prompts, ships=ships)
                ends_s = sent["ends_s"]
                periods[ships].append(1e3 * (ends_s[-1] - ends_s[0]) / (num_prompts - 1))
                if ships:
                    pairs = zip(ends_s, landed["ends_s"], strict=True)
                    waits_ms += [1e3 * (at - end) for end, at in pairs]
        lone_ms = []
        for number in range(NUM_LONE):
            sent, landed = run(seed=100 + number)
            lone_ms.append(1e3 * (landed["ends_s"][0] - sent["ends_s"][0]))
        alone_ms, beside_ms = statistics.median(periods[False]), statistics.median(periods[True])
        row: Row = {
            "bench": "frames that leave during their step",
            "variant": variant.name,
            "handoff": settings_of(variant),
            "tokens": length,
            "alone_ms": alone_ms,
            "streaming_ms": beside_ms,
            "slowdown": beside_ms / alone_ms - 1,
            "kv_after_prompt_ms": statistics.median(waits_ms),
            "worst_kv_after_prompt_ms": max(waits_ms),
            "lone_kv_after_prompt_ms": statistics.median(lone_ms),
        }
        self.rows.append(row)
        print(
            f"{variant.name:16s} {length:5d} tokens: alone {alone_ms:6.2f} ms, streaming "
            f"{beside_ms:6.2f}, {100 * (beside_ms / alone_ms - 1):+5.2f} %; KV after its prompt: "
            f"stream {statistics.median(waits_ms):6.2f}, worst {max(waits_ms):6.2f}, lone "
            f"{statistics.median(lone_ms):6.2f} ms",
            flush=True,
        )


def main() -> int:
    """Measures what is asked for and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", help="names, separated by semicolons; all by default")
    parser.add_argument("--decode-gpu", default="1")
    parser.add_argument("--seconds", type=float, default=170.0, help="no variant begins later")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_handoff_sweep.json")
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    sweep = Sweep(Bench(deterministic=False, mark_layers=MARK_LAYERS))
    failed: list[str] = []
    wanted = None if arguments.variants is None else arguments.variants.split(";")
    variants = [one for one in VARIANTS if wanted is None or one.name in wanted]
    gpu: str = arguments.decode_gpu
    # Their memory must fit beside an engine's.
    num_starting = 1 if gpu == "0" else NUM_STARTING
    waiting = deque(variants)
    started: deque[tuple[Variant, subprocess.Popen[str]]] = deque()
    while waiting or started:
        while waiting and len(started) < num_starting:
            # One takes longer to start than another to be measured.
            started.append((waiting[0], start_decode(waiting.popleft(), gpu)))
        variant, decode = started.popleft()
        if time.perf_counter() - started_s > arguments.seconds:
            failed.append(f"{variant.name}: no time")
            waiting.clear()
        else:
            try:
                sweep.measure(variant, decode)
            except Exception:  # noqa: BLE001 - one variant must not cost the others
                failed.append(variant.name)
                traceback.print_exc(limit=-4)
        stop(decode)
        found = {"failed": failed, "rows": sweep.rows}
        write_gpu("gpu_handoff_sweep", arguments.out, __doc__, started_s, **found)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
