"""A simulated decode worker: the real protocol over a pool of numbered, owned blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.decode_actions import AnswerCommit, AnswerReserve, DecodeAction, Scatter, Start
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.prefill_actions import (
    SendAbort,
    SendCommit,
    SendRenew,
    SendReserve,
)
from kv_transfer.protocol import (
    LinkEndpoint,
    Refusal,
    RefusalReason,
    ReservedBlocks,
)
from pdserve.request import (
    Request,
    RequestId,
    ReservationId,
    WorkerId,
)
from tests.unit.kv_transfer.node import CONFIG, GEOMETRY, Node, token_of

if TYPE_CHECKING:
    from tests.unit.kv_transfer.world import World


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

    def __init__(self, world: "World", worker_id: WorkerId, num_blocks: int) -> None:
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
            link_endpoints=(LinkEndpoint(host="sim", port=1, token=b"t"),),
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
        size = GEOMETRY.block_size
        for position in range(frame.first_token // size, -(-frame.end_token // size)):
            assert self.owner_by_block[blocks[position]] == action.reservation_id
            is_right = action.landed.is_intact
            self.content[blocks[position]] = (request.request_id if is_right else "bad", position)
        self.execute(self.handoffs.frame_scattered(action.reservation_id, frame.index))

    def _begin(self, action: Start) -> None:
        request, _, blocks = self.reserved.pop(action.reservation_id)
        for position, block in enumerate(blocks):
            assert self.content[block] == (request.request_id, position), "started with wrong KV"
        assert [token.token_id for token in action.first_tokens] == [token_of(request)]
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
                call_id, action.envelope, action.first_tokens, action.manifest_digest
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
