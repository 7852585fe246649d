"""A small universe in virtual time: prefill and decode workers, a router, and a bad network.

Control calls may be lost, duplicated, delayed and overtaken; links may die and corrupt frames;
workers may crash, restart at the same address, and freeze. Every write into a block is checked
against the block's owner, and what a sequence starts with against what its prompt needs.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.protocol import (
    CallFailed,
)
from pdserve.request import (
    WorkerId,
)
from tests.unit.kv_transfer.decode_node import DecodeNode
from tests.unit.kv_transfer.fake_router import Router
from tests.unit.kv_transfer.node import Node
from tests.unit.kv_transfer.prefill_node import PrefillNode

TICK_S = 0.2


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, and events per simulated run."""

    lost: float = 0.0
    duplicated: float = 0.0
    corrupt: float = 0.0
    max_delay_s: float = 0.02
    crashes: int = 0
    freezes: int = 0
    link_deaths: int = 0
    cancels: int = 0
    stale_targets: float = 0.0
    calm_after_s: float = 20.0


class World:
    def __init__(
        self,
        seed: int,
        faults: Faults,
        *,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_blocks: int = 200,
        skew_s: float = 600.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now_s = 0.0
        self.skew_s = skew_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.prefill = [PrefillNode(self, WorkerId(f"p{i}")) for i in range(num_prefill)]
        self.decode = [DecodeNode(self, WorkerId(f"d{i}"), num_blocks) for i in range(num_decode)]
        self.router = Router(self)
        for node in (*self.prefill, *self.decode):
            self._tick(node)

    @property
    def is_calm(self) -> bool:
        return self.now_s >= self.faults.calm_after_s

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._num_events, event))

    def delay_s(self) -> float:
        return self.rng.uniform(0.0005, 0.001 if self.is_calm else self.faults.max_delay_s)

    def chance(self, probability: float) -> bool:
        return not self.is_calm and self.rng.random() < probability

    def deliver(self, node: "Node", event: Callable[[], None], delay_s: float = 0.0) -> None:
        """Runs an event in a node's present life, once it is awake."""
        life = node.incarnation

        def arrive() -> None:
            if node.incarnation != life or not node.is_alive:
                return
            if node.frozen_until_s > self.now_s:
                self.after(node.frozen_until_s - self.now_s + 0.001, arrive)
                return
            event()

        self.after(delay_s, arrive)

    def call(
        self,
        caller: "Node",
        callee: "DecodeNode",
        handle: Callable[[Callable[[object], None]], None],
        timeout_s: float,
        on_answer: Callable[[object], None],
    ) -> None:
        """Sends a control call; exactly one answer comes back while the caller lives."""
        answers: list[object] = []

        def answer_once(answer: object) -> None:
            if not answers:
                answers.append(answer)
                on_answer(answer)

        def reply(answer: object) -> None:
            if not self.chance(self.faults.lost):
                self.deliver(caller, lambda: answer_once(answer), self.delay_s())

        def reach() -> None:
            if callee.is_alive:
                self.deliver(callee, lambda: handle(reply))
            else:
                reply(CallFailed(detail="connection refused", is_unreachable=True))

        copies = (
            0 if self.chance(self.faults.lost) else 2 if self.chance(self.faults.duplicated) else 1
        )
        for _ in range(copies):
            self.after(self.delay_s(), reach)
        self.deliver(caller, lambda: answer_once(CallFailed(detail="timed out")), timeout_s)

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def schedule_faults(self) -> None:
        end_s = self.faults.calm_after_s * 0.9
        nodes: list[Node] = [*self.prefill, *self.decode]
        for _ in range(self.faults.crashes):
            node = self.rng.choice(nodes)
            self.after(self.rng.uniform(0, end_s), node.crash)
        for _ in range(self.faults.freezes):
            frozen = self.rng.choice(nodes)
            self.after(self.rng.uniform(0, end_s), frozen.freeze)
        for _ in range(self.faults.link_deaths):
            owner = self.rng.choice(self.prefill)
            self.after(self.rng.uniform(0, end_s), owner.kill_a_link)
        for _ in range(self.faults.cancels):
            self.after(self.rng.uniform(0, end_s), self.router.cancel_any)

    def check_quiet(self) -> None:
        """Nothing is held anywhere, and every request ended exactly once."""
        for name, request in self.router.requests.items():
            assert len(request.ends) == 1, (name, request)
        for decode in self.decode:
            assert decode.handoffs.num_reservations == 0, decode.worker_id
            assert not decode.owner_by_block, decode.worker_id
            assert not decode.running, decode.worker_id
        for prefill in self.prefill:
            assert not prefill.handoffs, {k: h.stage for k, h in prefill.handoffs.items()}

    def _tick(self, node: "Node") -> None:
        if node.is_alive and node.frozen_until_s <= self.now_s:
            node.tick()
        self.after(TICK_S, lambda: self._tick(node))
