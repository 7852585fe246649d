"""A prefill and a decode worker of many ranks each, in one thread: the real protocol and memory.

Every rank has KV memory and links of its own; the protocol runs beside rank 0's, as in a worker.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.decode_actions import (
    AnswerCommit,
    AnswerReserve,
    DecodeAction,
    RejectFrame,
    Scatter,
    Start,
)
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FrameLanded, FrameSent, LinkDown, LinkEvent
from kv_transfer.memory_links import MemoryHub, MemoryReceiver, MemorySender
from kv_transfer.prefill_actions import (
    PrefillAction,
    PushFrame,
    ReportNeedsPlacement,
    ReportRefused,
    SendCommit,
    SendReserve,
)
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import (
    DecodeTarget,
    FirstToken,
    Identity,
    Refusal,
    ReservedBlocks,
)
from kv_transfer.shipping import RankShipper, RankUnloader, ShipFrame, UnloadFrame, region_of
from kv_transfer.transport import LinkPeer
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.link_memory import max_frame_bytes
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.request import (
    BlockId,
    HandoffId,
    Incarnation,
    Request,
    RequestId,
    ReservationId,
    SamplingParams,
    WorkerId,
)
from pdserve.timeline import ManualClock

CONFIG = HandoffConfig(frame_tokens=32, frame_layers=2, layered_from_tokens=1, ring_slots=2)
P, D = Incarnation(1), Incarnation(2)


def identity(name: str, incarnation: Incarnation, geometry: KvGeometry) -> Identity:
    return Identity(
        worker_id=WorkerId(name),
        incarnation=incarnation,
        compatibility_digest=geometry.digest(),
        shape=geometry.shape,
    )


class Ranks:
    """The memories of one worker and one sequence's block table."""

    def __init__(self, geometry: KvGeometry, num_tokens: int, seed: int) -> None:
        self.geometry = geometry
        num_blocks = -(-num_tokens // geometry.block_size)
        self.kv = [KvTensors(geometry, num_blocks + 2, part) for part in geometry.parts]
        ids = list(range(num_blocks + 2))
        random.Random(seed).shuffle(ids)
        self.table = tuple(BlockId(block) for block in ids[:num_blocks])
        size = geometry.block_size
        self.slots = [self.table[t // size] * size + t % size for t in range(num_tokens)]

    def write(self, values: Tensor) -> None:
        """Takes [layer, K or V, token, head, dim] of the whole model."""
        for kv in self.kv:
            heads = kv.part.kv_heads
            for index, layer in enumerate(kv.part.layers):
                for half, part in enumerate(kv.layer(index)):
                    mine = values[layer, half, :, heads.start : heads.stop]
                    part[self.slots] = mine.to(part.dtype)

    def read(self, rank: int) -> Tensor:
        """Returns [rank's layer, K or V, token, rank's head, dim]."""
        kv = self.kv[rank]
        layers = range(len(kv.part.layers))
        return torch.stack(
            [torch.stack([half[self.slots] for half in kv.layer(layer)]) for layer in layers]
        )


@dataclass
class Reserver:
    """Grants always."""

    num_cached_tokens: int = 0
    released: list[ReservationId] = field(default_factory=list)

    def reserve(self, reservation_id: ReservationId, request: Request) -> ReservedBlocks | Refusal:
        return ReservedBlocks(num_cached_tokens=self.num_cached_tokens)

    def release(self, reservation_id: ReservationId) -> None:
        self.released.append(reservation_id)

    def stop(self, reservation_id: ReservationId) -> None:
        raise AssertionError("nothing restarts here")


class ShardedPair:
    """Moves one request's KV; `run` returns when nothing moves any more."""

    def __init__(
        self,
        prefill: KvGeometry,
        decode: KvGeometry,
        num_tokens: int,
        *,
        num_cached_tokens: int = 0,
        seed: int = 0,
    ) -> None:
        self.prefill, self.decode = Ranks(prefill, num_tokens, seed), Ranks(decode, num_tokens, 1)
        self.reserver = Reserver(num_cached_tokens)
        self.started: Start | None = None
        self.needs_placement: list[str] = []
        self.refused: list[str] = []
        self.frames: list[PushFrame] = []
        self.events: deque[tuple[str, LinkEvent]] = deque()
        self.held: set[tuple[int, int]] = set()
        """Lanes (prefill rank, decode rank) whose frames are not pushed."""
        hub, clock = MemoryHub(), ManualClock()
        receivers = [self._make_receiver(hub, decode, rank) for rank in range(decode.num_ranks)]
        self.senders = [self._make_sender(hub, rank) for rank in range(prefill.num_ranks)]
        pairs = zip(self.prefill.kv, self.senders, strict=True)
        self.shippers = [RankShipper(kv, sender) for kv, sender in pairs]
        ends = zip(self.decode.kv, receivers, strict=True)
        self.unloaders = [RankUnloader(kv, receiver) for kv, receiver in ends]
        self.request = Request(
            request_id=RequestId("r"),
            token_ids=tuple(range(num_tokens)),
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(),
            handoff_id=HandoffId("h"),
        )
        self.handoff = PrefillHandoff(
            request=self.request,
            me=identity("p", P, prefill),
            geometry=prefill,
            config=CONFIG,
            clock=clock,
        )
        self.handoffs = DecodeHandoffs(
            me=identity("d", D, decode),
            geometry=decode,
            config=CONFIG,
            reserver=self.reserver,
            link_endpoints=tuple(unloader.endpoints()[0] for unloader in self.unloaders),
            mint_id=lambda: ReservationId(b"reservation"),
            clock=clock,
        )

    def _make_receiver(self, hub: MemoryHub, geometry: KvGeometry, rank: int) -> MemoryReceiver:
        layers = CONFIG.frame_layers
        return MemoryReceiver(
            hub=hub,
            incarnation=D,
            ring_slots=CONFIG.ring_slots,
            slot_bytes=max_frame_bytes(geometry, rank, CONFIG.frame_tokens, "auto", layers),
            post=lambda event: self.events.append(("decode", event)),
            rank=rank,
        )

    def _make_sender(self, hub: MemoryHub, rank: int) -> MemorySender:
        return MemorySender(
            hub=hub,
            worker_id=WorkerId("p"),
            incarnation=P,
            ring_slots=CONFIG.ring_slots,
            post=lambda event: self.events.append(("prefill", event)),
            rank=rank,
        )

    def run(self, *, chunk_tokens: int = 50) -> None:
        """Places, computes in chunks, samples, and lets everything land."""
        target = DecodeTarget(worker_id=WorkerId("d"), incarnation=D, address="", decode_attempt=1)
        self._prefill(self.handoff.place(target))
        num_tokens = len(self.request.token_ids)
        for computed in range(chunk_tokens, num_tokens, chunk_tokens):
            self._prefill(self.handoff.computed(computed))
            self.pump()
        token = FirstToken(token_id=7, output_index=0)
        self._prefill(self.handoff.sampled(token, is_finished=False))
        self.pump()

    def pump(self) -> None:
        """Ships what has room and handles events until nothing moves."""
        while True:
            ready = [action for action in self.frames if self._can_ship(action)]
            if ready:
                self.frames.remove(ready[0])
                self._ship(ready[0])
            elif self.events:
                self._handle(*self.events.popleft())
            else:
                return

    def _can_ship(self, action: PushFrame) -> bool:
        frame = action.frame
        sender = self.senders[frame.prefill_rank]
        lane = (frame.prefill_rank, frame.decode_rank)
        return lane not in self.held and sender.has_room(D, frame.decode_rank)

    def _ship(self, action: PushFrame) -> None:
        frame = action.frame
        peer = LinkPeer(
            worker_id=WorkerId("d"),
            incarnation=D,
            endpoint=action.endpoint,
            rank=frame.decode_rank,
        )
        order = ShipFrame(
            prefill_rank=frame.prefill_rank,
            peer=peer,
            reservation_id=action.reservation_id,
            frame_index=frame.index,
            region=region_of(frame, self.prefill.table, self.prefill.geometry.block_size),
        )
        self.shippers[frame.prefill_rank].ship(order)

    def _handle(self, side: str, event: LinkEvent) -> None:
        match side, event:
            case "prefill", FrameSent():
                sent = self.handoff.frame_sent(event.reservation_id, event.frame_index)
                self._prefill(sent)
            case "prefill", LinkDown():
                for reservation_id in event.lost:
                    self._prefill(self.handoff.frames_lost(reservation_id, event.detail))
            case "decode", FrameLanded():
                self._decode(self.handoffs.frame_landed(event))
            case "decode", LinkDown():
                self._decode(self.handoffs.link_down(event.link))

    def _prefill(self, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case SendReserve(envelope=envelope):
                    self._decode(self.handoffs.reserve(1, envelope, self.request), action)
                case SendCommit():
                    answer = self.handoffs.commit(
                        2, action.envelope, action.first_tokens, action.manifest_digest
                    )
                    self._commit = action
                    self._decode(answer)
                case PushFrame():
                    self.frames.append(action)
                case ReportNeedsPlacement(detail=detail):
                    self.needs_placement.append(detail)
                case ReportRefused(reason=reason, detail=detail):
                    self.refused.append(f"{reason.value}: {detail}")

    def _decode(self, actions: list[DecodeAction], call: SendReserve | None = None) -> None:
        for action in actions:
            match action:
                case AnswerReserve(answer=answer):
                    assert call is not None
                    self._prefill(self.handoff.reserve_answered(call.target, answer))
                case AnswerCommit(answer=answer):
                    self._prefill(self.handoff.commit_answered(self._commit.target, answer))
                case Scatter():
                    self._unload(action)
                case RejectFrame(landed=landed):
                    self.unloaders[landed.link.own_rank].reject(landed)
                case Start():
                    self.started = action

    def _unload(self, action: Scatter) -> None:
        frame = action.frame
        region = region_of(frame, self.decode.table, self.decode.geometry.block_size)
        order = UnloadFrame(landed=action.landed, region=region)
        assert self.unloaders[frame.decode_rank].unload(order)
        self._decode(self.handoffs.frame_scattered(action.reservation_id, frame.index))
