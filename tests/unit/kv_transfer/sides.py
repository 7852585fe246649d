"""Parts for tests of one side of the hand-off at a time."""

from dataclasses import replace

from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FrameLanded, LinkId
from kv_transfer.lanes import make_pair
from kv_transfer.plan import make_manifest
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import (
    BlockReserver,
    DecodeTarget,
    Envelope,
    FirstToken,
    Grant,
    Identity,
    LinkEndpoint,
    Refusal,
    ReservedBlocks,
    make_envelope,
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
from pdserve.timeline import ManualClock

GEOMETRY = KvGeometry(
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    dtype="float32",
    model_revision="test",
)
CONFIG = HandoffConfig(
    frame_tokens=32, lease_s=9.0, hold_s=20.0, call_timeout_s=1.0, frame_timeout_s=2.0
)
NUM_TOKENS = 100
REQUEST = Request(
    request_id=RequestId("r"),
    token_ids=tuple(range(NUM_TOKENS)),
    num_prompt_tokens=NUM_TOKENS,
    sampling=SamplingParams(),
    handoff_id=HandoffId("h"),
    tenant_salt=b"tenant",
)
PAIR = make_pair(GEOMETRY, GEOMETRY)
MANIFEST = make_manifest(PAIR, NUM_TOKENS, 0, 32)
PREFILL = Identity(
    worker_id=WorkerId("p"),
    incarnation=Incarnation(1),
    compatibility_digest=GEOMETRY.digest(),
    shape=GEOMETRY.shape,
)
DECODE = Identity(
    worker_id=WorkerId("d"),
    incarnation=Incarnation(2),
    compatibility_digest=GEOMETRY.digest(),
    shape=GEOMETRY.shape,
)
ENDPOINT = LinkEndpoint(host="127.0.0.1", port=1, token=b"t")
LINK = LinkId(PREFILL.incarnation, 1)
TOKEN = FirstToken(token_id=7, output_index=0)


def target(decode_attempt: int = 1) -> DecodeTarget:
    return DecodeTarget(
        worker_id=DECODE.worker_id,
        incarnation=DECODE.incarnation,
        address="d:1",
        decode_attempt=decode_attempt,
    )


def grant(number: int = 1) -> Grant:
    return Grant(
        reservation_id=ReservationId(b"res%d" % number),
        num_cached_tokens=0,
        manifest_digest=MANIFEST.digest,
        links=(ENDPOINT,),
        lease_s=9.0,
        frame_tokens=32,
        frame_layers=None,
        decode_shape=GEOMETRY.shape,
        wire_dtype="float32",
    )


def make_prefill(clock: ManualClock, request: Request = REQUEST) -> PrefillHandoff:
    return PrefillHandoff(
        request=request, me=PREFILL, geometry=GEOMETRY, config=CONFIG, clock=clock
    )


def make_decode(clock: ManualClock, reserver: BlockReserver) -> DecodeHandoffs:
    numbers = iter(range(1, 1000))
    return DecodeHandoffs(
        me=DECODE,
        geometry=GEOMETRY,
        config=CONFIG,
        reserver=reserver,
        link_endpoints=(ENDPOINT,),
        mint_id=lambda: ReservationId(b"res%d" % next(numbers)),
        clock=clock,
    )


def envelope(
    attempt: int = 1,
    decode_attempt: int = 1,
    reservation: int | None = None,
    me: Identity = PREFILL,
) -> Envelope:
    reservation_id = None if reservation is None else ReservationId(b"res%d" % reservation)
    request = replace(REQUEST, attempt=attempt)
    return make_envelope(me, request, target(decode_attempt), reservation_id)


def landed(
    index: int,
    *,
    reservation: int = 1,
    is_intact: bool = True,
    num_bytes: int | None = None,
    link: LinkId = LINK,
) -> FrameLanded:
    if num_bytes is None:
        num_bytes = MANIFEST.frames[min(max(index, 0), len(MANIFEST.frames) - 1)].num_bytes
    return FrameLanded(
        link=link,
        reservation_id=ReservationId(b"res%d" % reservation),
        frame_index=index,
        num_bytes=num_bytes,
        slot=0,
        is_intact=is_intact,
    )


class FakeReserver:
    """Grants always, unless `refusal` is set; writes down what was asked of it."""

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self.held: set[ReservationId] = set()
        self.released: list[ReservationId] = []
        self.stopped: list[ReservationId] = []

    def reserve(self, reservation_id: ReservationId, request: Request) -> ReservedBlocks | Refusal:
        if self.refusal is not None:
            return self.refusal
        self.held.add(reservation_id)
        return ReservedBlocks(num_cached_tokens=0)

    def release(self, reservation_id: ReservationId) -> None:
        self.held.remove(reservation_id)
        self.released.append(reservation_id)

    def stop(self, reservation_id: ReservationId) -> None:
        self.stopped.append(reservation_id)
