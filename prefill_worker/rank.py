"""The rank processes of a prefill worker."""

import sys

from kv_transfer.device_choice import find_link_device
from kv_transfer.follower_desk import FollowerDesk
from kv_transfer.link_device import LinkDevice
from kv_transfer.protocol import Identity
from kv_transfer.ranked_shipping import RankedShipper
from kv_transfer.sender import LinkPool
from kv_transfer.sending_link import MAX_FRAMES_IN_BLOCKS, SenderIdentity
from kv_transfer.shipping import RankShipper, Shipper
from kv_transfer.spans import SpanShipper, describe_event
from kv_transfer.transport import FrameSender
from pdserve.rank.follow import FollowerContext
from pdserve.rank.startup import RankContext, run_rank
from pdserve.request import WorkerId
from prefill_worker.engine import PrefillEngine
from prefill_worker.handoff import HandoffDesk
from prefill_worker.scheduler import PrefillScheduler


def make_links(
    context: RankContext | FollowerContext, device: LinkDevice | None = None, rank: int = 0
) -> FrameSender:
    """Makes links to decode ranks when they are first used."""
    config = context.config
    me = SenderIdentity(
        worker_id=WorkerId(config.worker_id),
        incarnation=context.incarnation,
        host=config.host,
        rank=rank,
    )
    return LinkPool(
        me=me,
        config=config.handoff,
        post=context.inbox.post,
        faults=config.faults,
        device=device,
    )


def build_engine(
    context: RankContext, links: FrameSender, device: LinkDevice | None = None
) -> PrefillEngine:
    """Puts the parts of rank 0 together."""
    config = context.config
    worker_id = WorkerId(config.worker_id)
    scheduler = PrefillScheduler(
        config.engine,
        context.kv.num_blocks,
        context.geometry.model_revision,
        context.clock,
        max_waiting=config.max_waiting,
        look_ahead=config.handoff.look_ahead,
        num_stages=context.geometry.pipeline_parallel,
    )
    scheduler.tell_cached(context.granules)
    desk = HandoffDesk(
        me=Identity(
            worker_id=worker_id,
            incarnation=context.incarnation,
            compatibility_digest=context.geometry.digest(),
            shape=context.geometry.shape,
        ),
        geometry=context.geometry,
        config=config.handoff,
        faults=config.faults,
        scheduler=scheduler,
        shipper=_note_spans(context, _make_shipper(context, links, device)),
        outbox=context.outbox,
        clock=context.clock,
        marks=None if device is None else context.marks,
    )
    return PrefillEngine(
        config=config,
        scheduler=scheduler,
        runner=context.runner,
        desk=desk,
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
        shipper=RankShipper(context.kv, links, device, context.marks),
    )


def build(context: RankContext) -> PrefillEngine:
    """Makes the engine of rank 0, with its links."""
    device = find_link_device(context.kv, context.config.handoff)
    return build_engine(context, make_links(context, device), device)


def _make_shipper(context: RankContext, links: FrameSender, device: LinkDevice | None) -> Shipper:
    local = RankShipper(context.kv, links, device, context.marks)
    if context.followers is None:
        return local
    max_in_flight = context.config.handoff.ring_slots if device is None else MAX_FRAMES_IN_BLOCKS
    return RankedShipper(local, context.followers.send, context.geometry.num_ranks, max_in_flight)


def _note_spans(context: RankContext, shipper: Shipper) -> Shipper:
    return shipper if context.spans is None else SpanShipper(shipper, context.spans, context.clock)


if __name__ == "__main__":
    sys.exit(run_rank(build, build_follower, describe_event))
