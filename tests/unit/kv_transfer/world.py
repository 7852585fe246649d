"""A small universe in virtual time: prefill and decode workers, a router, and a bad network.

Control calls may be lost, duplicated, delayed and overtaken; links may die and corrupt frames;
workers may crash, restart at the same address, and freeze. Every write into a block is checked
against the block's owner, and what a sequence starts with against what its prompt needs.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kv_transfer.decode_actions import AnswerCommit, AnswerReserve, DecodeAction, Scatter, Start
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FrameLanded, LinkId
from kv_transfer.plan import Frame
from kv_transfer.prefill_actions import (
    DropFrames,
    PrefillAction,
    PushFrame,
    ReleaseBlocks,
    ReportHandedOff,
    ReportNeedsPlacement,
    ReportReturned,
    SendAbort,
    SendCommit,
    SendRenew,
    SendReserve,
)
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import (
    CallFailed,
    DecodeTarget,
    FirstToken,
    Identity,
    LinkEndpoint,
    Refusal,
    RefusalReason,
    ReservedBlocks,
)
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.request import (
    HandoffId,
    Incarnation,
    Request,
    RequestId,
    ReservationId,
    SamplingParams,
    WorkerId,
)

GEOMETRY = KvGeometry(
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    dtype="float32",
    model_revision="test",
)
CONFIG = HandoffConfig(
    frame_tokens=64,
    lease_s=4.0,
    hold_s=6.0,
    call_timeout_s=1.0,
    frame_timeout_s=2.0,
)
TICK_S = 0.2
MAX_ATTEMPTS = 12
FROZEN_AFTER_S = 2.0


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


class SkewedClock:
    """The world's time plus an offset that differs between workers."""

    def __init__(self, world: "World", offset_s: float) -> None:
        self._world = world
        self._offset_s = offset_s

    def now(self) -> float:
        return self._world.now_s + self._offset_s


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


class Node:
    def __init__(self, world: World, worker_id: WorkerId) -> None:
        self.world = world
        self.worker_id = worker_id
        self.incarnation = Incarnation(0)
        self.is_alive = False
        self.frozen_until_s = 0.0
        self.boot()

    def boot(self) -> None:
        self.incarnation = Incarnation(self.world.rng.getrandbits(64))
        self.clock = SkewedClock(self.world, self.world.rng.uniform(-1, 1) * self.world.skew_s)
        self.is_alive = True
        self.frozen_until_s = 0.0
        self.start()

    def crash(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        life = self.incarnation
        self.stop()
        self.world.after(self.world.rng.uniform(0.3, 2.0), self.boot)
        self.world.after(1.0, lambda: self.world.router.worker_died(self.worker_id, life))

    def freeze(self) -> None:
        if not self.is_alive:
            return
        length_s = self.world.rng.uniform(0.5, 8.0)
        self.frozen_until_s = self.world.now_s + length_s
        if length_s > FROZEN_AFTER_S:
            life = self.incarnation
            self.world.after(
                FROZEN_AFTER_S, lambda: self.world.router.worker_died(self.worker_id, life)
            )

    def me(self) -> Identity:
        return Identity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            compatibility_digest=GEOMETRY.digest(),
        )

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError


@dataclass
class Running:
    request: Request
    decode_attempt: int
    blocks: list[int]


class Reserver:
    """The BlockReserver of a `DecodeNode`."""

    def __init__(self, node: "DecodeNode") -> None:
        self._node = node

    def reserve(self, reservation_id: ReservationId, request: Request) -> ReservedBlocks | Refusal:
        return self._node.reserve(reservation_id, request)

    def release(self, reservation_id: ReservationId) -> None:
        self._node.release(reservation_id)

    def stop(self, reservation_id: ReservationId) -> None:
        self._node.stop_sequence(reservation_id)


class DecodeNode(Node):
    """Its scheduler is this class, too: a pool of numbered blocks with an owner each."""

    def __init__(self, world: World, worker_id: WorkerId, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        super().__init__(world, worker_id)

    def start(self) -> None:
        self.owner_by_block: dict[int, ReservationId] = {}
        self.content: dict[int, object] = {}
        self.reserved: dict[ReservationId, tuple[Request, int, list[int]]] = {}
        self.running: dict[ReservationId, Running] = {}
        self._replies: dict[int, Callable[[object], None]] = {}
        rng = self.world.rng
        self.handoffs = DecodeHandoffs(
            me=self.me(),
            geometry=GEOMETRY,
            config=CONFIG,
            reserver=Reserver(self),
            link_endpoint=LinkEndpoint(host="sim", port=1, token=b"t"),
            mint_id=lambda: ReservationId(rng.randbytes(16)),
            clock=self.clock,
        )

    def stop(self) -> None:
        for prefill in self.world.prefill:
            prefill.lose_peer(self.incarnation)
        self.owner_by_block, self.running = {}, {}

    def tick(self) -> None:
        self.execute(self.handoffs.tick())

    # What a scheduler does.

    def reserve(self, reservation_id: ReservationId, request: Request) -> ReservedBlocks | Refusal:
        num_cached = 0
        if self.world.rng.random() < 0.3:
            num_cached = len(request.token_ids) // GEOMETRY.block_size
            num_cached = self.world.rng.randint(0, num_cached)
        table = -(-len(request.token_ids) // GEOMETRY.block_size)
        free = [b for b in range(self.num_blocks) if b not in self.owner_by_block]
        if len(free) < table:
            return Refusal(reason=RefusalReason.NO_ROOM, detail="full", retry_after_s=0.1)
        blocks = self.world.rng.sample(free, table)
        for block in blocks:
            self.owner_by_block[block] = reservation_id
            self.content[block] = "stale"
        for position in range(num_cached):
            self.content[blocks[position]] = (request.request_id, position)
        self.reserved[reservation_id] = (request, num_cached, blocks)
        return ReservedBlocks(num_cached_tokens=num_cached * GEOMETRY.block_size)

    def release(self, reservation_id: ReservationId) -> None:
        _, _, blocks = self.reserved.pop(reservation_id)
        self._free(reservation_id, blocks)

    def stop_sequence(self, reservation_id: ReservationId) -> None:
        running = self.running.pop(reservation_id, None)
        if running is not None:
            self._free(reservation_id, running.blocks)

    def _free(self, reservation_id: ReservationId, blocks: list[int]) -> None:
        for block in blocks:
            assert self.owner_by_block.pop(block) == reservation_id

    # Actions.

    def execute(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case AnswerReserve(call_id=call_id, answer=answer):
                    self._replies.pop(call_id)(answer)
                case AnswerCommit(call_id=call_id, answer=answer):
                    self._replies.pop(call_id)(answer)
                case Scatter():
                    scatter = action
                    delay_s = self.world.rng.choice((0.0, 0.0, 0.01, 0.3))
                    self.world.deliver(self, lambda s=scatter: self._scatter(s), delay_s)
                case Start():
                    self._begin(action)

    def _scatter(self, action: Scatter) -> None:
        request, _, blocks = self.reserved[action.reservation_id]
        frame = action.frame
        for position in range(frame.first_block, frame.first_block + frame.num_blocks):
            assert self.owner_by_block[blocks[position]] == action.reservation_id
            self.content[blocks[position]] = (request.request_id, position)
        self.execute(self.handoffs.frame_scattered(action.reservation_id, frame.index))

    def _begin(self, action: Start) -> None:
        request, _, blocks = self.reserved.pop(action.reservation_id)
        for position, block in enumerate(blocks):
            assert self.content[block] == (request.request_id, position), "started with wrong KV"
        assert action.first_token.token_id == token_of(request)
        running = Running(request, action.envelope.decode_attempt, blocks)
        self.running[action.reservation_id] = running
        self.world.deliver(
            self, lambda: self._end(action.reservation_id), self.world.rng.uniform(0.1, 2.0)
        )

    def _end(self, reservation_id: ReservationId) -> None:
        running = self.running.get(reservation_id)
        if running is None:
            return
        self.stop_sequence(reservation_id)
        request = running.request
        self.world.router.finished(request.request_id, request.attempt, running.decode_attempt)

    # Calls.

    def on_reserve(
        self, action: SendReserve, request: Request, reply: Callable[[object], None]
    ) -> None:
        call_id = self._keep(reply)
        self.execute(self.handoffs.reserve(call_id, action.envelope, request))

    def on_commit(self, action: SendCommit, reply: Callable[[object], None]) -> None:
        call_id = self._keep(reply)
        self.execute(
            self.handoffs.commit(
                call_id, action.envelope, action.first_token, action.manifest_digest
            )
        )

    def on_abort(self, action: SendAbort, reply: Callable[[object], None]) -> None:
        self.execute(self.handoffs.abort(action.envelope, action.detail))
        reply(None)

    def on_renew(self, action: SendRenew, reply: Callable[[object], None]) -> None:
        (is_alive,) = self.handoffs.renew((action.envelope,))
        reply(is_alive)

    def on_cancel(self, request_id: RequestId, attempt: int) -> None:
        self.execute(self.handoffs.cancel(request_id, attempt).actions)
        for reservation_id, running in list(self.running.items()):
            request = running.request
            if request.request_id == request_id and request.attempt <= attempt:
                self.stop_sequence(reservation_id)

    def _keep(self, reply: Callable[[object], None]) -> int:
        call_id = len(self._replies) + 1
        while call_id in self._replies:
            call_id += 1
        self._replies[call_id] = reply
        return call_id


@dataclass
class SimLink:
    link_id: LinkId
    decode: DecodeNode
    decode_incarnation: Incarnation
    queue: list[tuple[ReservationId, Frame]] = field(default_factory=list)
    is_busy: bool = False
    is_dead: bool = False


class PrefillNode(Node):
    def start(self) -> None:
        self.handoffs: dict[tuple[RequestId, int], PrefillHandoff] = {}
        self.released: set[tuple[RequestId, int]] = set()
        self.links: dict[Incarnation, SimLink] = {}
        self._epochs: dict[Incarnation, int] = {}

    def stop(self) -> None:
        for link in list(self.links.values()):
            self._kill(link)
        self.handoffs = {}

    def tick(self) -> None:
        for key, handoff in list(self.handoffs.items()):
            self.execute(handoff, handoff.tick())
            if handoff.is_settled:
                del self.handoffs[key]

    def submit(self, request: Request, target: DecodeTarget, *, ends_here: bool = False) -> None:
        key = (request.request_id, request.attempt)
        handoff = PrefillHandoff(
            request=request, me=self.me(), geometry=GEOMETRY, config=CONFIG, clock=self.clock
        )
        self.handoffs[key] = handoff
        self.execute(handoff, handoff.place(target))
        num_tokens, delay_s = 0, 0.0
        while num_tokens < len(request.token_ids):
            num_tokens = min(
                num_tokens + self.world.rng.choice((40, 64, 100)), len(request.token_ids)
            )
            delay_s += self.world.rng.uniform(0.01, 0.3)
            self.world.deliver(
                self, lambda n=num_tokens: self.execute(handoff, handoff.computed(n)), delay_s
            )
        token = FirstToken(token_id=token_of(request), output_index=request.num_emitted)
        self.world.deliver(self, lambda: self._sample(handoff, token, ends_here), delay_s)

    def _sample(self, handoff: PrefillHandoff, token: FirstToken, ends_here: bool) -> None:
        if handoff.is_done:
            return
        self.execute(handoff, handoff.sampled(token, is_finished=ends_here))
        if ends_here:
            self.world.router.ended_at_prefill(handoff.request)

    def on_place(self, key: tuple[RequestId, int], target: DecodeTarget) -> None:
        handoff = self.handoffs.get(key)
        if handoff is not None:
            self.execute(handoff, handoff.place(target))

    def on_cancel(self, request_id: RequestId, attempt: int) -> None:
        for key, handoff in list(self.handoffs.items()):
            if key[0] == request_id and key[1] <= attempt:
                self.execute(handoff, handoff.cancel())

    def execute(self, handoff: PrefillHandoff, actions: list[PrefillAction]) -> None:
        world, request = self.world, handoff.request
        key = (request.request_id, request.attempt)
        for action in actions:
            match action:
                case SendReserve(target=target):
                    reserve = action
                    self._call(
                        target,
                        lambda node, reply, a=reserve: node.on_reserve(a, request, reply),
                        action.timeout_s,
                        lambda answer, t=target: self.execute(
                            handoff, handoff.reserve_answered(t, answer)
                        ),
                    )
                case SendCommit(target=target):
                    commit = action
                    self._call(
                        target,
                        lambda node, reply, a=commit: node.on_commit(a, reply),
                        action.timeout_s,
                        lambda answer, t=target: self.execute(
                            handoff, handoff.commit_answered(t, answer)
                        ),
                    )
                case SendAbort(target=target):
                    abort = action
                    self._call(
                        target,
                        lambda node, reply, a=abort: node.on_abort(a, reply),
                        1.0,
                        lambda answer: None,
                    )
                case SendRenew(target=target):
                    renew = action
                    self._call(
                        target,
                        lambda node, reply, a=renew: node.on_renew(a, reply),
                        action.timeout_s,
                        lambda answer, t=target: self._renewed(handoff, t, answer),
                    )
                case PushFrame():
                    assert key not in self.released, "packed a block that was given back"
                    self._push(action)
                case DropFrames(reservation_id=reservation_id):
                    for link in self.links.values():
                        link.queue = [item for item in link.queue if item[0] != reservation_id]
                case ReleaseBlocks():
                    assert key not in self.released, "blocks given back twice"
                    self.released.add(key)
                case ReportNeedsPlacement(decode_attempt=decode_attempt):
                    world.router.needs_placement(self, request, decode_attempt)
                case ReportHandedOff():
                    world.router.handed_off(request, action.decode_attempt)
                case ReportReturned():
                    world.router.returned(request)

    def _renewed(self, handoff: PrefillHandoff, target: DecodeTarget, answer: object) -> None:
        if isinstance(answer, bool):
            self.execute(handoff, handoff.renewed(target, is_alive=answer))

    def _call(
        self,
        target: DecodeTarget,
        handle: Callable[[DecodeNode, Callable[[object], None]], None],
        timeout_s: float,
        on_answer: Callable[[object], None],
    ) -> None:
        node = next(node for node in self.world.decode if node.worker_id == target.worker_id)
        self.world.call(self, node, lambda reply: handle(node, reply), timeout_s, on_answer)

    # Links.

    def _push(self, action: PushFrame) -> None:
        peer = action.target.incarnation
        link = self.links.get(peer)
        if link is None:
            node = next(n for n in self.world.decode if n.worker_id == action.target.worker_id)
            epoch = self._epochs[peer] = self._epochs.get(peer, 0) + 1
            link = self.links[peer] = SimLink(LinkId(self.incarnation, epoch), node, peer)
            if not node.is_alive or node.incarnation != peer:
                link.queue.append((action.reservation_id, action.frame))
                self._kill(link)
                return
        link.queue.append((action.reservation_id, action.frame))
        self._pump(link)

    def _pump(self, link: SimLink) -> None:
        if link.is_busy or link.is_dead or not link.queue:
            return
        link.is_busy = True
        reservation_id, frame = link.queue[0]
        landed = FrameLanded(
            link=link.link_id,
            reservation_id=reservation_id,
            frame_index=frame.index,
            num_bytes=frame.num_bytes,
            slot=0,
            is_intact=not self.world.chance(self.world.faults.corrupt),
        )
        node = link.decode

        def arrive() -> None:
            if link.is_dead:
                return
            link.is_busy = False
            if (reservation_id, frame) in link.queue:
                link.queue.remove((reservation_id, frame))
            for handoff in list(self.handoffs.values()):
                self.execute(handoff, handoff.frame_sent(reservation_id, frame.index))
            if node.incarnation == link.decode_incarnation:
                self.world.deliver(node, lambda: node.execute(node.handoffs.frame_landed(landed)))
            self._pump(link)

        self.world.deliver(self, arrive, self.world.delay_s())

    def kill_a_link(self) -> None:
        if self.links:
            self._kill(self.world.rng.choice(list(self.links.values())))

    def lose_peer(self, peer: Incarnation) -> None:
        link = self.links.get(peer)
        if link is not None:
            self._kill(link)

    def _kill(self, link: SimLink) -> None:
        link.is_dead = True
        self.links.pop(link.decode_incarnation, None)
        lost = {reservation_id for reservation_id, _ in link.queue}
        node = link.decode

        def tell_prefill() -> None:
            for handoff in list(self.handoffs.values()):
                for reservation_id in lost:
                    self.execute(handoff, handoff.frames_lost(reservation_id, "killed"))

        self.world.deliver(self, tell_prefill, self.world.rng.uniform(0.01, 0.5))
        if node.incarnation == link.decode_incarnation:
            self.world.deliver(
                node,
                lambda: node.execute(node.handoffs.link_down(link.link_id)),
                self.world.rng.uniform(0.01, 0.5),
            )


def token_of(request: Request) -> int:
    return sum(request.token_ids) % 1000


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

    def __init__(self, world: World) -> None:
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
        tracked.is_handed_off = False
        target = tracked.target = self._choose(decode_attempt + 1)
        key = (request.request_id, request.attempt)
        self.world.deliver(
            node, lambda: node.on_place(key, target), self.world.rng.uniform(0.05, 0.3)
        )

    def handed_off(self, request: Request, decode_attempt: int) -> None:
        if self._is_current(request):
            tracked = self.requests[request.request_id]
            assert tracked.target is not None
            tracked.is_handed_off = True
            if not any(
                node.is_alive and node.incarnation == tracked.target.incarnation
                for node in self.world.decode
            ):
                self._resubmit(request.request_id)

    def returned(self, request: Request) -> None:
        if self._is_current(request):
            self._resubmit(request.request_id)

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
