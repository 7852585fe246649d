"""A simulated prefill worker: the real protocol over links that die and corrupt."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.events import FrameLanded, LinkId
from kv_transfer.plan import Frame
from kv_transfer.prefill_actions import (
    DropFrames,
    PrefillAction,
    PushFrame,
    ReleaseBlocks,
    ReportHandedOff,
    ReportNeedsPlacement,
    ReportRefused,
    ReportReturned,
    SendAbort,
    SendCommit,
    SendRenew,
    SendReserve,
)
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import (
    DecodeTarget,
    FirstToken,
)
from pdserve.request import (
    Incarnation,
    Request,
    RequestId,
    ReservationId,
)
from tests.unit.kv_transfer.decode_node import DecodeNode
from tests.unit.kv_transfer.node import CONFIG, GEOMETRY, Node, token_of


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
        if handoff is None or handoff.is_done:
            self.world.router.place_refused(*key, target)
            return
        self.execute(handoff, handoff.place(target))

    def on_cancel(self, request_id: RequestId, attempt: int) -> None:
        for key, handoff in list(self.handoffs.items()):
            if key[0] == request_id and key[1] <= attempt:
                self.execute(handoff, handoff.cancel())

    def execute(self, handoff: PrefillHandoff, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case SendReserve() | SendCommit() | SendAbort() | SendRenew():
                    self._send(handoff, action)
                case (
                    ReportNeedsPlacement() | ReportHandedOff() | ReportReturned() | ReportRefused()
                ):
                    self._report(handoff.request, action)
                case _:
                    self._move(handoff.request, action)

    def _send(
        self, handoff: PrefillHandoff, action: SendReserve | SendCommit | SendAbort | SendRenew
    ) -> None:
        target = action.target
        match action:
            case SendReserve():
                self._call(
                    target,
                    lambda node, reply: node.on_reserve(action, handoff.request, reply),
                    action.timeout_s,
                    lambda answer: self.execute(handoff, handoff.reserve_answered(target, answer)),
                )
            case SendCommit():
                self._call(
                    target,
                    lambda node, reply: node.on_commit(action, reply),
                    action.timeout_s,
                    lambda answer: self.execute(handoff, handoff.commit_answered(target, answer)),
                )
            case SendAbort():
                self._call(
                    target, lambda node, reply: node.on_abort(action, reply), 1.0, lambda _: None
                )
            case SendRenew():
                self._call(
                    target,
                    lambda node, reply: node.on_renew(action, reply),
                    action.timeout_s,
                    lambda answer: self._renewed(handoff, target, answer),
                )

    def _report(
        self,
        request: Request,
        action: ReportNeedsPlacement | ReportHandedOff | ReportReturned | ReportRefused,
    ) -> None:
        router = self.world.router
        match action:
            case ReportNeedsPlacement(decode_attempt=decode_attempt):
                router.needs_placement(self, request, decode_attempt)
            case ReportHandedOff(decode_attempt=decode_attempt):
                router.handed_off(request, decode_attempt)
            case ReportReturned():
                router.returned(request)
            case ReportRefused():
                router.refused(request)

    def _move(self, request: Request, action: PushFrame | DropFrames | ReleaseBlocks) -> None:
        key = (request.request_id, request.attempt)
        match action:
            case PushFrame():
                assert key not in self.released, "packed a block that was given back"
                self._push(action)
            case DropFrames(reservation_id=reservation_id):
                for link in self.links.values():
                    link.queue = [item for item in link.queue if item[0] != reservation_id]
            case ReleaseBlocks():
                assert key not in self.released, "blocks given back twice"
                self.released.add(key)

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
