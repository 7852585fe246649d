"""The rank process of a decode worker."""

import secrets
import sys

from decode_worker.engine import DecodeEngine
from decode_worker.landing import LandingDesk
from decode_worker.reserver import SchedulerReserver
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.plan import max_frame_bytes
from kv_transfer.protocol import Identity
from kv_transfer.receiver import LinkListener
from kv_transfer.shipping import RankUnloader
from kv_transfer.transport import FrameReceiver
from pdserve.rank.startup import RankContext, run_rank
from pdserve.request import ReservationId, WorkerId


def make_links(context: RankContext) -> FrameReceiver:
    """Listens for links of prefill ranks."""
    handoff = context.config.handoff
    return LinkListener(
        host=context.config.host,
        incarnation=context.incarnation,
        config=handoff,
        slot_bytes=max_frame_bytes(context.geometry, 0, handoff.frame_tokens, handoff.wire_dtype),
        post=context.inbox.post,
    )


def build_engine(context: RankContext, links: FrameReceiver) -> DecodeEngine:
    """Puts the parts of a decode rank together."""
    config = context.config
    scheduler = DecodeScheduler(
        config.engine,
        context.kv.num_blocks,
        context.geometry.model_revision,
        context.clock,
        max_waiting=config.max_waiting,
        max_local_prefill_tokens=config.max_local_prefill_tokens,
    )
    me = Identity(
        worker_id=WorkerId(config.worker_id),
        incarnation=context.incarnation,
        compatibility_digest=context.geometry.digest(),
        shape=context.geometry.shape,
    )
    reserver = SchedulerReserver(
        scheduler, context.max_model_len, config.faults.reject_reservations
    )
    unloader = RankUnloader(context.kv, links)
    handoffs = DecodeHandoffs(
        me=me,
        geometry=context.geometry,
        config=config.handoff,
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


if __name__ == "__main__":
    sys.exit(run_rank(lambda context: build_engine(context, make_links(context))))
