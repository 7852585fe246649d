"""A simulated router: resubmits what a dead worker held, fences by attempt numbers."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kv_transfer.protocol import (
    DecodeTarget,
)
from pdserve.request import (
    HandoffId,
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    WorkerId,
)
from tests.unit.kv_transfer.prefill_node import PrefillNode

if TYPE_CHECKING:
    from tests.unit.kv_transfer.world import World

MAX_ATTEMPTS = 12


@dataclass
class Tracked:
    request: Request
    prefill: PrefillNode | None = None
    target: DecodeTarget | None = None
    is_handed_off: bool = False
    ends: list[str] = field(default_factory=list)
    ends_here: bool = False


class Router:
    """Knows who holds what, resubmits what a dead worker held, fences by attempt numbers."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.requests: dict[RequestId, Tracked] = {}

    def submit(self, name: str, num_tokens: int, *, ends_here: bool = False) -> None:
        request = Request(
            request_id=RequestId(name),
            token_ids=tuple(range(1, num_tokens + 1)),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(),
            handoff_id=HandoffId(f"h-{name}"),
            tenant_salt=b"salt",
            attempt=0,
        )
        self.requests[request.request_id] = Tracked(request, ends_here=ends_here)
        self._resubmit(request.request_id)

    def _resubmit(self, request_id: RequestId) -> None:
        tracked = self.requests[request_id]
        if tracked.ends:
            return
        self._cancel_workers(request_id, tracked.request.attempt)
        if tracked.request.attempt >= MAX_ATTEMPTS:
            tracked.ends.append("failed")
            return
        tracked.request = replace(tracked.request, attempt=tracked.request.attempt + 1)
        tracked.is_handed_off = False
        alive = [node for node in self.world.prefill if node.is_alive]
        if not alive:
            tracked.prefill = None
            self.world.after(0.5, lambda: self._resubmit(request_id))
            return
        tracked.prefill = self.world.rng.choice(alive)
        tracked.target = self._choose(1)
        node, request, target = tracked.prefill, tracked.request, tracked.target
        self.world.deliver(
            node,
            lambda: node.submit(request, target, ends_here=tracked.ends_here),
            self.world.delay_s(),
        )

    def _choose(self, decode_attempt: int) -> DecodeTarget:
        node = self.world.rng.choice(self.world.decode)
        incarnation = node.incarnation
        if self.world.chance(self.world.faults.stale_targets):
            incarnation = Incarnation(incarnation ^ 1)
        return DecodeTarget(
            worker_id=node.worker_id,
            incarnation=incarnation,
            address="sim",
            decode_attempt=decode_attempt,
        )

    def _is_current(self, request: Request) -> bool:
        tracked = self.requests[request.request_id]
        return not tracked.ends and tracked.request.attempt == request.attempt

    def needs_placement(self, node: PrefillNode, request: Request, decode_attempt: int) -> None:
        if not self._is_current(request):
            return
        tracked = self.requests[request.request_id]
        if tracked.target is None or tracked.target.decode_attempt != decode_attempt:
            return
        tracked.is_handed_off = False
        self._place(node, tracked, decode_attempt + 1)

    def _place(self, node: PrefillNode, tracked: Tracked, decode_attempt: int) -> None:
        target = tracked.target = self._choose(decode_attempt)
        key = (tracked.request.request_id, tracked.request.attempt)
        self.world.deliver(
            node, lambda: node.on_place(key, target), self.world.rng.uniform(0.05, 0.3)
        )

    def place_refused(self, request_id: RequestId, attempt: int, target: DecodeTarget) -> None:
        tracked = self.requests[request_id]
        if not tracked.ends and tracked.request.attempt == attempt and tracked.target == target:
            self._resubmit(request_id)

    def handed_off(self, request: Request, decode_attempt: int) -> None:
        if self._is_current(request):
            tracked = self.requests[request.request_id]
            assert tracked.target is not None
            if tracked.target.decode_attempt != decode_attempt:
                return
            tracked.is_handed_off = True
            if not any(
                node.is_alive and node.incarnation == tracked.target.incarnation
                for node in self.world.decode
            ):
                self._resubmit(request.request_id)

    def returned(self, request: Request) -> None:
        if self._is_current(request):
            self._resubmit(request.request_id)

    def refused(self, request: Request) -> None:
        if self._is_current(request):
            self.requests[request.request_id].ends.append("refused")

    def finished(self, request_id: RequestId, attempt: int, decode_attempt: int) -> None:
        tracked = self.requests[request_id]
        current = tracked.target
        if tracked.ends or tracked.request.attempt != attempt or current is None:
            return
        if current.decode_attempt == decode_attempt:
            tracked.ends.append("finished")
            self._cancel_workers(request_id, attempt)

    def ended_at_prefill(self, request: Request) -> None:
        if self._is_current(request):
            self.requests[request.request_id].ends.append("finished")

    def cancel_any(self) -> None:
        live = [name for name, tracked in self.requests.items() if not tracked.ends]
        if live:
            self.cancel(self.world.rng.choice(live))

    def cancel(self, request_id: RequestId) -> None:
        tracked = self.requests[request_id]
        tracked.ends.append("cancelled")
        self._cancel_workers(request_id, tracked.request.attempt)

    def _cancel_workers(self, request_id: RequestId, attempt: int) -> None:
        for node in (*self.world.prefill, *self.world.decode):
            if node.is_alive and not self.world.chance(self.world.faults.lost):
                self.world.deliver(
                    node,
                    lambda n=node: n.on_cancel(request_id, attempt),
                    self.world.delay_s(),
                )

    def worker_died(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        for request_id, tracked in self.requests.items():
            if tracked.ends or tracked.target is None:
                continue
            was_prefill = tracked.prefill is not None and tracked.prefill.worker_id == worker_id
            was_decode = (
                tracked.target.worker_id == worker_id and tracked.target.incarnation == incarnation
            )
            if (was_prefill and not tracked.is_handed_off) or (
                was_decode and tracked.is_handed_off
            ):
                self._resubmit(request_id)
            elif was_decode and tracked.prefill is not None and self.world.chance(0.5):
                # Before prefill asks for it; else prefill finds out by itself.
                self._place(tracked.prefill, tracked, tracked.target.decode_attempt + 1)
