"""Clusters of many shapes over the same few GPUs, several of them at once, and what each gave.

Starting a replica takes most of its time and little of a GPU, so clusters start side by side.
"""

import asyncio
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import psutil

from launcher.client import Generation
from launcher.local_pool import LocalCluster
from launcher.ray_pool import RayConfig, RayPlace
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import DeviceKind, Dtype
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.registry.base import WorkerRecord
from pdserve.request import Role
from tests.support.cluster import (
    TEST_ENGINE,
    ClusterHarness,
    HarnessClient,
    cluster_config,
    wait_until,
)
from tests.support.oracles import assert_ledger

PROMPTS = tuple(
    tuple(3 + (7 * index + place) % 350 for place in range(length))
    for index, length in enumerate((5, 40, 90, 200))
)
NUM_TOKENS = 48
LONG_TOKENS = 150
"""Of the stream during which a rank is killed; see `SLOW`."""
TOKENS_BEFORE_KILL = 6
NUM_AT_ONCE = 5
START_TIMEOUT_S = 240.0
TIMEOUT_S = 120.0
FIGURES_TIMEOUT_S = 10.0
SLOW = FaultConfig(step_delay_s=0.02)
"""Loads are reported twice a second: a stream must last for some of that."""
PATIENT = HandoffConfig(
    frame_tokens=64,
    lease_s=20.0,
    call_timeout_s=15.0,
    connect_timeout_s=20.0,
    frame_timeout_s=20.0,
)
"""Processes that share a GPU wait for their turn, and compile their kernels at first use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Ranks and stages of both pools; `prefill` is None where decode workers do all."""

    prefill: tuple[int, int] | None
    decode: tuple[int, int]
    dtype: Dtype = "float32"
    kills: str = ""
    """The pool of which a rank is killed in mid-stream, `prefill` or `decode`; decode has two
    replicas then."""
    visible_gpus: str | None = None
    """As of CUDA_VISIBLE_DEVICES, where ranks are to share GPUs."""
    on_ray: bool = False
    """Replicas are placement groups of a Ray cluster of its own."""

    def __str__(self) -> str:
        """Says it as the name of a test."""
        pools = [pool for pool in (self.prefill, self.decode) if pool]
        name = "-".join("x".join(map(str, pool)) for pool in pools)
        return f"{name} {self.dtype}"


@dataclass(kw_only=True)
class Outcome:
    """What a cluster gave."""

    tokens: list[list[int]] = field(default_factory=list)
    """Of all prompts, asked for at once."""
    long: list[int] = field(default_factory=list)
    """Of the prompt of `cut`, as far as that goes; of a cluster of one pool."""
    again: list[list[int]] = field(default_factory=list)
    """Once more, when what was killed is back."""
    cut: Generation | None = None
    """The stream during which a rank was killed."""
    killed: WorkerRecord | None = None
    back: WorkerRecord | None = None
    """The killed replica's record afterwards."""
    num_ranks: list[int] = field(default_factory=list)
    """Of each replica."""
    parents: list[str] = field(default_factory=list)
    """What started the face of each replica."""
    num_handed_off: float = 0.0
    num_recomputed: float = 0.0
    error: str = ""


def run_shapes(
    folder: Path, device: DeviceKind, shapes: Sequence[Shape], num_at_once: int = NUM_AT_ONCE
) -> Mapping[Shape, Outcome]:
    """Runs a cluster of each shape, those that come first first; none is let down by another."""
    lock = threading.Lock()

    def run(shape: Shape) -> Outcome:
        outcome = Outcome()
        started_s = time.monotonic()
        # Which GPUs there are is read when a cluster is made.
        with lock, mock.patch.dict(os.environ, _environment(shape)):
            harness = _make_harness(_config(folder, device, shape), shape)
        try:
            harness.cluster.start()
            ready_s = time.monotonic() - started_s
            _fill(outcome, harness, shape)
            print(f"{shape}: ready in {ready_s:.1f} s, done in {time.monotonic() - started_s:.1f}")
        except Exception:  # noqa: BLE001  the edge of a thread: a test shows it
            outcome.error = traceback.format_exc() + "\n".join(harness.lines[-40:])
            print(f"{shape}: FAILED after {time.monotonic() - started_s:.1f} s\n{outcome.error}")
        finally:
            harness.cluster.stop()
        return outcome

    with ThreadPoolExecutor(num_at_once) as pool:
        return dict(zip(shapes, pool.map(run, shapes), strict=True))


def _make_harness(config: ClusterConfig, shape: Shape) -> ClusterHarness:
    harness = ClusterHarness(config)
    if shape.on_ray:
        engines = {Role.PREFILL: config.engine, Role.DECODE: config.decode_engine}
        place = RayPlace(RayConfig(num_cpus=8), report=harness.lines.append, engines=engines)
        harness.cluster = LocalCluster(config, report=harness.lines.append, place=place)
    return harness


def _environment(shape: Shape) -> dict[str, str]:
    return {} if shape.visible_gpus is None else {"CUDA_VISIBLE_DEVICES": shape.visible_gpus}


def _config(folder: Path, device: DeviceKind, shape: Shape) -> ClusterConfig:
    tensor, stages = shape.prefill or shape.decode
    engine = replace(
        TEST_ENGINE,
        model=str(folder),
        device=device,
        dtype=shape.dtype,
        deterministic=device == "cuda",
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
    )
    return cluster_config(
        folder,
        engine=engine,
        decode_tensor_parallel=shape.decode[0],
        decode_pipeline_parallel=shape.decode[1],
        num_prefill=1 if shape.prefill else 0,
        num_decode=2 if shape.kills else 1,
        # A hand-off that fails must not be mended by computing the prompt again.
        max_local_prefill_tokens=0 if shape.prefill else None,
        handoff=PATIENT,
        decode_faults=SLOW if shape.kills else FaultConfig(),
        frozen_after_s=30.0,
        worker_silence_s=10.0,
        ready_timeout_s=START_TIMEOUT_S,
    )


def _fill(outcome: Outcome, harness: ClusterHarness, shape: Shape) -> None:
    members = harness.cluster.members()
    outcome.num_ranks = [len(m.record.rank_pids) for m in members if m.record is not None]
    faces = [psutil.Process(m.face_pid) for m in members if m.face_pid is not None]
    outcome.parents = [psutil.Process(face.ppid()).name() for face in faces]
    outcome.tokens = asyncio.run(_all_tokens(harness))
    if shape.prefill is not None:
        _read_counters(outcome, harness)
    if shape.prefill is None:
        outcome.long = list(asyncio.run(_long(harness)).token_ids)
    if not shape.kills:
        return
    outcome.cut, outcome.killed = asyncio.run(_kill_in_mid_stream(harness, shape.kills))
    name = str(outcome.killed.worker_id)

    def is_back() -> bool:
        record = harness.cluster.member(name).record
        return record is not None and record.incarnation != outcome.killed.incarnation

    wait_until(is_back, TIMEOUT_S)
    outcome.back = harness.cluster.member(name).record
    outcome.again = asyncio.run(_all_tokens(harness, num_workers=len(members)))


def _read_counters(outcome: Outcome, harness: ClusterHarness) -> None:
    """Waits for the figures of the last hand-off, which come with a heartbeat."""
    names = [m.worker_id for m in harness.cluster.members() if m.worker_id.startswith("decode")]

    def has_all() -> bool:
        figures = [harness.scrape_worker(name) for name in names]
        outcome.num_handed_off, outcome.num_recomputed = (
            sum(one.get(name, 0.0) for one in figures)
            for name in (
                "pdserve_handoffs_completed_total",
                "pdserve_recomputed_prompt_tokens_total",
            )
        )
        return outcome.num_handed_off >= len(PROMPTS)

    wait_until(has_all, FIGURES_TIMEOUT_S)


async def _all_tokens(harness: ClusterHarness, num_workers: int | None = None) -> list[list[int]]:
    async with harness.connect() as client:
        found = await asyncio.gather(*(_generate(client, prompt) for prompt in PROMPTS))
        if num_workers is not None:
            await assert_ledger(client, num_workers, timeout_s=20.0)
    return [list(one.token_ids) for one in found]


async def _long(harness: ClusterHarness) -> Generation:
    async with harness.connect() as client:
        return await _generate(client, PROMPTS[2], max_tokens=LONG_TOKENS)


async def _generate(client: HarnessClient, prompt: Sequence[int], **extra: object) -> Generation:
    wish = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **extra}
    return await client.generate(prompt_ids=prompt, timeout_s=TIMEOUT_S, **wish)


async def _kill_in_mid_stream(
    harness: ClusterHarness, pool: str
) -> tuple[Generation, WorkerRecord]:
    """Kills the last rank of the replica that a stream comes from, or of a prefill replica."""
    killed: list[WorkerRecord] = []
    async with harness.connect() as client:
        await client.wait_idle(20.0)

        async def kill_once(found: Generation) -> None:
            if killed or len(found.token_ids) < TOKENS_BEFORE_KILL:
                return
            name = "prefill-0" if pool == "prefill" else await client.busy_worker("decode")
            record = harness.cluster.member(name).record
            assert record is not None
            killed.append(record)
            os.kill(record.rank_pids[-1], signal.SIGKILL)

        found = await _generate(client, PROMPTS[2], max_tokens=LONG_TOKENS, on_message=kill_once)
    assert killed, "the stream ended before a rank was killed"
    return found, killed[0]
