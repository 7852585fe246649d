"""Faults of workers on purpose: who holds a request, at which stage, and what kills it there."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launcher.client import Generation
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.request import Incarnation
from pdserve.rpc.v1 import inference_pb2
from tests.support.cluster import ClusterHarness, HarnessClient, make_request, wait_until_async
from tests.support.oracles import assert_one_end, assert_same_tokens

Stage = Literal["queued", "mid-prefill", "mid-transfer", "committed", "decoding"]
Side = Literal["prefill", "decode"]
Which = Literal["face", "rank"]

SHORT_HANDOFF = HandoffConfig(
    frame_tokens=64,
    frame_layers=3,
    layered_from_tokens=1,
    lease_s=3.0,
    hold_s=6.0,
    call_timeout_s=2.0,
    frame_timeout_s=3.0,
)
SHORT_TIMES: dict[str, object] = {
    "heartbeat_s": 0.2,
    "registry_lease_s": 1.5,
    "frozen_after_s": 3.0,
    "orphan_grace_s": 1.5,
    "worker_silence_s": 2.0,
    "handoff": SHORT_HANDOFF,
}
"""Fields of ClusterConfig: short, but not so short that a busy machine looks dead."""
SLOW_PREFILL = FaultConfig(step_delay_s=0.1, frame_delay_s=0.15)
SLOW_DECODE = FaultConfig(step_delay_s=0.025)
"""Windows wide enough to be hit: frames lag behind chunks, so that commits wait for them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request that can be sent again and again."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 1

    def request(self, request_id: str = "") -> inference_pb2.GenerateRequest:
        return make_request(
            prompt_ids=self.prompt_ids,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=True,
            request_id=request_id,
        )


def random_plan(rng: random.Random, num_prompt: int, max_tokens: int, *, is_greedy: bool) -> Plan:
    """Draws a prompt of plain ids."""
    return Plan(
        prompt_ids=tuple(rng.randrange(3, 380) for _ in range(num_prompt)),
        max_tokens=max_tokens,
        temperature=0.0 if is_greedy else 0.9,
        seed=rng.randrange(1 << 32),
    )


@dataclass
class Undisturbed:
    """What each plan gives when nothing is broken, asked for once."""

    client_of: ClusterHarness
    known: dict[Plan, Generation] = field(default_factory=dict)

    async def learn(self, client: HarnessClient, plans: Sequence[Plan]) -> None:
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.known]
        found = await asyncio.gather(*(client.generate(plan.request()) for plan in new))
        self.known.update(zip(new, found, strict=True))

    def check(self, plan: Plan, found: Generation) -> None:
        """TOK and ONE-END."""
        assert_same_tokens(found, self.known[plan])
        assert_one_end(found)


@dataclass
class Stream:
    """One request under way; `tokens` grows while it runs."""

    plan: Plan
    generation: Generation = field(default_factory=Generation)
    task: asyncio.Task[Generation] | None = None

    def start(self, client: HarnessClient) -> "Stream":
        self.task = asyncio.get_running_loop().create_task(self._run(client))
        return self

    async def _run(self, client: HarnessClient) -> Generation:
        async for response in client.start(self.plan.request()):
            self.generation.add(response)
        return self.generation

    @property
    def num_tokens(self) -> int:
        return len(self.generation.token_ids)

    async def end(self) -> Generation:
        assert self.task is not None
        return await self.task


def start_all(client: HarnessClient, plans: Sequence[Plan]) -> list[Stream]:
    """Starts all plans at once."""
    return [Stream(plan).start(client) for plan in plans]


async def find_victim(
    client: HarnessClient, streams: Sequence[Stream], stage: Stage, side: Side
) -> str:
    """Waits until a worker of a side has work at a stage, and returns its id."""
    found: list[str] = []

    async def is_there() -> bool:
        workers = await client.loads()
        found[:] = [
            worker.worker_id
            for worker in workers.values()
            if worker.role == side and _has_work(worker, streams, stage)
        ]
        return bool(found)

    await wait_until_async(is_there, 20.0, f"{side} work at stage {stage}")
    return found[0]


def _has_work(worker: inference_pb2.WorkerInfo, streams: Sequence[Stream], stage: Stage) -> bool:
    load, ledger = worker.load, worker.ledger
    has_first_token = any(stream.num_tokens == 1 for stream in streams)
    num_tokens = max(stream.num_tokens for stream in streams)
    is_prefill = worker.role == "prefill"
    match stage:
        case "queued":
            return load.num_waiting > 0 if is_prefill else ledger.reservations > 0
        case "mid-prefill":
            return load.num_running > 0 if is_prefill else ledger.reservations > 0
        case "mid-transfer":
            is_sending = ledger.leases > 0 and load.num_running > 0
            return is_sending if is_prefill else ledger.transfers > 0
        case "committed":
            return has_first_token and (ledger.leases > 0 if is_prefill else ledger.transfers > 0)
        case "decoding":
            return num_tokens > 5 and (is_prefill or load.num_running > 0)


def incarnations(harness: ClusterHarness) -> dict[str, Incarnation]:
    """Returns every replica's life; all must be registered."""
    found = {}
    for member in harness.cluster.members():
        assert member.record is not None, f"{member.worker_id} is not registered"
        found[member.worker_id] = member.record.incarnation
    return found


async def wait_reborn(
    harness: ClusterHarness, worker_id: str, before: Incarnation, timeout_s: float = 40.0
) -> None:
    """Waits until a replica is registered under a new incarnation and the router uses it."""

    async def is_back() -> bool:
        record = harness.cluster.member(worker_id).record
        return record is not None and record.incarnation != before

    await wait_until_async(is_back, timeout_s, f"{worker_id} is back")


async def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits, inside an event loop, for a condition to come true."""

    async def is_true() -> bool:
        return condition()

    await wait_until_async(is_true, timeout_s, what)
