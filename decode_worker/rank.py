"""The rank processes of a decode worker."""

import secrets
import sys

from decode_worker.engine import DecodeEngine
from decode_worker.landing import LandingDesk
from decode_worker.reserver import SchedulerReserver
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.codec import endpoint_from_wire
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.device_choice import find_link_device
from kv_transfer.follower_desk import FollowerDesk
from kv_transfer.link_device import LinkDevice
from kv_transfer.protocol import Identity
from kv_transfer.ranked_shipping import RankedUnloader
from kv_transfer.receiver import LinkListener
from kv_transfer.shipping import RankUnloader, Unloader
from kv_transfer.spans import SpanUnloader, describe_event
from kv_transfer.transport import FrameReceiver
from pdserve.config.link_memory import link_slot_bytes, settle_frames
from pdserve.engine.batch import lookahead_of
from pdserve.rank.follow import FollowerContext
from pdserve.rank.startup import RankContext, run_rank
from pdserve.request import ReservationId, WorkerId


def make_links(
    context: RankContext | FollowerContext, device: LinkDevice | None = None, rank: int = 0
) -> FrameReceiver:
    """Listens for links of prefill ranks."""
    handoff = context.config.handoff
    return LinkListener(
        host=context.config.host,
        incarnation=context.incarnation,
        config=handoff,
        slot_bytes=link_slot_bytes(handoff, context.geometry, rank, is_on_gpu=device is not None),
        post=context.inbox.post,
        rank=rank,
        device=device,
    )


def build_engine(
    context: RankContext, links: FrameReceiver, device: LinkDevice | None = None
) -> DecodeEngine:
    """Puts the parts of rank 0 together."""
    config = context.config
    scheduler = DecodeScheduler(
        config.engine,
        context.kv.num_blocks,
        context.geometry.model_revision,
        context.clock,
        max_waiting=config.max_waiting,
        max_local_prefill_tokens=config.max_local_prefill_tokens,
        lookahead=lookahead_of(context.runner, context.geometry.pipeline_parallel),
    )
    scheduler.tell_cached(context.granules)
    me = Identity(
        worker_id=WorkerId(config.worker_id),
        incarnation=context.incarnation,
        compatibility_digest=context.geometry.digest(),
        shape=context.geometry.shape,
    )
    unloader = _note_spans(
        context, _make_unloader(context, RankUnloader(context.kv, links, device))
    )
    reserver = SchedulerReserver(
        scheduler,
        context.max_model_len,
        config.faults.reject_reservations,
        unloader.withdraw,
    )
    handoffs = DecodeHandoffs(
        me=me,
        geometry=context.geometry,
        config=config.handoff,
        frame_sizes=settle_frames(config.handoff, context.geometry, is_on_gpu=device is not None),
        reserver=reserver,
        link_endpoints=unloader.endpoints(),
        mint_id=lambda: ReservationId(secrets.token_bytes(16)),
        clock=context.clock,
    )
    landing = LandingDesk(
        handoffs=handoffs,
        reserver=reserver,
        scheduler=scheduler,
        unloader=unloader,
        block_size=context.geometry.block_size,
        outbox=context.outbox,
    )
    return DecodeEngine(
        config=config,
        scheduler=scheduler,
        runner=context.runner,
        landing=landing,
        outbox=context.outbox,
        clock=context.clock,
        max_model_len=context.max_model_len,
    )


def build_follower(context: FollowerContext) -> FollowerDesk:
    """Puts the parts of another rank together."""
    device = find_link_device(context.kv, context.config.handoff)
    links = make_links(context, device, context.rank)
    return FollowerDesk(
        rank=context.rank,
        compute=context.compute,
        tell=context.tell,
        unloader=RankUnloader(context.kv, links, device),
    )


def build(context: RankContext) -> DecodeEngine:
    """Makes the engine of rank 0, with its links."""
    device = find_link_device(context.kv, context.config.handoff)
    return build_engine(context, make_links(context, device), device)


def _make_unloader(context: RankContext, local: RankUnloader) -> Unloader:
    if context.followers is None:
        return local
    endpoints = [endpoint_from_wire(link) for link in context.follower_links]
    return RankedUnloader(local, context.followers.send, endpoints)


def _note_spans(context: RankContext, unloader: Unloader) -> Unloader:
    if context.spans is None:
        return unloader
    return SpanUnloader(unloader, context.spans, context.clock)


if __name__ == "__main__":
    sys.exit(run_rank(build, build_follower, describe_event))
