"""The six pass conditions that the tests of a cluster share: what must hold whatever was broken."""

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from launcher.client import Generation
from pdserve.rpc.v1 import inference_pb2
from tests.support.cluster import ClusterHarness, HarnessClient, wait_until_async

LEDGER_TIMEOUT_S = 5.0
CANARY_IDS = (7, 11, 13, 17, 19)
BAD_LINES = ("Traceback (most recent call last)", "Task exception was never retrieved")


def assert_same_tokens(found: Generation, expected: Generation) -> None:
    """TOK: ids, text and end are those of the undisturbed run."""
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text
    assert found.finish_reason == expected.finish_reason


def assert_one_end(generation: Generation) -> None:
    """ONE-END: gap-free messages, one completion and nothing behind it, counts that agree."""
    assert generation.sequences == list(range(len(generation.sequences)))
    assert generation.finish is not None, "the stream has no completion"
    assert generation.usage is not None
    assert generation.finish.num_tokens == len(generation.token_ids)
    for sample in generation.samples.values():
        assert sample.finish is not None
        assert sample.finish.num_tokens == len(sample.token_ids)
    total = sum(len(sample.token_ids) for sample in generation.samples.values())
    assert generation.usage.completion_tokens == total


def assert_not_recomputed(generation: Generation, block_size: int = 16) -> None:
    """NO-RECOMPUTE: KV went over the link and decode computed at most one block of prompt."""
    timeline = generation.timeline
    assert timeline is not None
    assert timeline.kv_blocks_shipped > 0, "no KV block was shipped"
    assert timeline.recomputed_tokens <= block_size


def ledger_faults(workers: Iterable[inference_pb2.WorkerInfo]) -> list[str]:
    """LEDGER: lists what is not back at rest, by worker and field."""
    faults = []
    for worker in workers:
        ledger = worker.ledger
        if ledger.total_blocks == 0:
            faults.append(f"{worker.worker_id}: no ledger")
        if ledger.free_blocks + ledger.cached_blocks != ledger.total_blocks:
            faults.append(
                f"{worker.worker_id}: {ledger.free_blocks} free + {ledger.cached_blocks} cached "
                f"of {ledger.total_blocks} blocks"
            )
        for name, count in (
            ("sequences", ledger.sequences),
            ("reservations", ledger.reservations),
            ("leases", ledger.leases),
            ("transfers", ledger.transfers),
            ("held_handoffs", ledger.held_handoffs),
        ):
            if count:
                faults.append(f"{worker.worker_id}: {count} {name}")
    return faults


async def assert_ledger(
    client: HarnessClient, num_workers: int, timeout_s: float = LEDGER_TIMEOUT_S
) -> None:
    """LEDGER: within `timeout_s`, every worker answers and holds nothing."""
    faults: list[str] = ["not asked yet"]

    async def is_at_rest() -> bool:
        workers = await client.loads()
        faults[:] = ledger_faults(workers.values())
        if len(workers) != num_workers:
            faults.append(f"{len(workers)} of {num_workers} workers answer")
        return not faults

    try:
        await wait_until_async(is_at_rest, timeout_s, "all ledgers at rest")
    except AssertionError as error:
        raise AssertionError(f"{error}: {'; '.join(faults)}") from None


@dataclass
class Canary:
    """CANARY: a fixed one-token request works before, during and after; nothing ends or traces."""

    harness: ClusterHarness
    expected: Generation
    num_restarts: int
    num_lines: int

    @classmethod
    async def hatch(cls, harness: ClusterHarness, client: HarnessClient) -> "Canary":
        """Notes the healthy answer and who has been restarted so far."""
        return cls(
            harness=harness,
            expected=await cls._sing(client),
            num_restarts=cls._restarts(harness),
            num_lines=len(harness.lines),
        )

    async def assert_alive(self, client: HarnessClient, num_expected_restarts: int = 0) -> None:
        """Asks again, and looks for exits and for tracebacks since `hatch`.

        `num_expected_restarts` counts the replicas that the test itself has killed.
        """
        assert_same_tokens(await self._sing(client), self.expected)
        assert self._restarts(self.harness) - self.num_restarts == num_expected_restarts
        bad = [
            line
            for line in self.harness.lines[self.num_lines :]
            if any(text in line for text in BAD_LINES)
        ]
        assert not bad, "\n".join(bad)

    @staticmethod
    async def _sing(client: HarnessClient) -> Generation:
        return await client.generate(
            prompt_ids=CANARY_IDS, max_tokens=1, temperature=0.0, ignore_eos=True
        )

    @staticmethod
    def _restarts(harness: ClusterHarness) -> int:
        return sum(member.num_restarts for member in harness.cluster.members())


@dataclass(frozen=True)
class Resources:
    """BOUND: what a set of processes holds."""

    rss_bytes: int
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pids: Iterable[int]) -> "Resources":
        """Adds up over processes; all of them must live."""
        processes = [psutil.Process(pid) for pid in pids]
        return cls(
            rss_bytes=sum(process.memory_info().rss for process in processes),
            num_fds=sum(process.num_fds() for process in processes),
            num_threads=sum(process.num_threads() for process in processes),
        )

    def assert_no_growth(
        self, before: "Resources", *, rss_bytes: int, num_fds: int, num_threads: int
    ) -> None:
        """Compares with an earlier moment of the same processes, warm already."""
        assert self.rss_bytes - before.rss_bytes <= rss_bytes
        assert self.num_fds - before.num_fds <= num_fds
        assert self.num_threads - before.num_threads <= num_threads
