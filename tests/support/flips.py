"""Replicas that change their pool, and a stream of requests meanwhile, all compared with others."""

import asyncio
from collections.abc import Sequence

from launcher.pool import Member
from pdserve.request import Role
from tests.support.cluster import ClusterHarness, HarnessClient, wait_until_async
from tests.support.faults import Plan, Undisturbed

FLIP_TIMEOUT_S = 30.0


class RequestStream:
    """Clients that ask one request after the other, until the end of the block.

    None may fail, and each must give what it gave before: TOK, ONE-END.
    """

    def __init__(
        self, client: HarnessClient, known: Undisturbed, plans: Sequence[Plan], num_clients: int
    ) -> None:
        self._client = client
        self._known = known
        self._plans = plans
        self._num_clients = num_clients
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_done = 0

    async def __aenter__(self) -> "RequestStream":
        self._tasks = [asyncio.create_task(self._ask(i)) for i in range(self._num_clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)

    async def wait_more(self, count: int, timeout_s: float = 60.0) -> None:
        """Waits until so many more requests have been served."""
        wanted = self.num_done + count

        async def are_done() -> bool:
            failed = [task for task in self._tasks if task.done() and task.exception() is not None]
            if failed:
                await failed[0]
            return self.num_done >= wanted

        await wait_until_async(are_done, timeout_s, f"{count} more requests")

    async def _ask(self, number: int) -> None:
        while not self._stopped.is_set():
            plan = self._plans[number % len(self._plans)]
            self._known.check(plan, await self._client.generate(plan.request()))
            self.num_done += 1
            number += 1


async def wait_role(
    harness: ClusterHarness, worker_id: str, role: Role, timeout_s: float = FLIP_TIMEOUT_S
) -> Member:
    """Waits until a replica has registered with a role, and returns it."""

    async def serves_there() -> bool:
        record = harness.cluster.member(worker_id).record
        return record is not None and record.role is role

    await wait_until_async(serves_there, timeout_s, f"{worker_id} is a {role} replica")
    return harness.cluster.member(worker_id)


async def flip(harness: ClusterHarness, worker_id: str, role: Role) -> tuple[Member, Member]:
    """Flips a replica; returns what it was and what it is."""
    before = harness.cluster.member(worker_id)
    harness.cluster.flip(worker_id, role)
    return before, await wait_role(harness, worker_id, role)


async def wait_works_as(client: HarnessClient, worker_id: str, role: Role) -> None:
    """Waits until KV has gone from a prefill replica, or come to a decode replica, over a link."""

    async def has_moved_kv() -> bool:
        info = (await client.loads()).get(worker_id)
        if info is None or info.role != role:
            return False
        is_prefill = role is Role.PREFILL
        return any(one.bytes_sent if is_prefill else one.bytes_received for one in info.links)

    await wait_until_async(has_moved_kv, FLIP_TIMEOUT_S, f"{worker_id} works as a {role} replica")
