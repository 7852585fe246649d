"""A rank process of a replica that can change its pool: it knows both engines."""

import sys

import decode_worker.rank
import prefill_worker.rank
from kv_transfer.follower_desk import FollowerDesk
from kv_transfer.spans import describe_event
from pdserve.rank.follow import FollowerContext
from pdserve.rank.startup import RankContext, run_rank
from pdserve.rank.step_loop import Engine
from pdserve.request import Role


def build(context: RankContext) -> Engine:
    """Makes the engine of the role that the rank has now."""
    if context.config.role is Role.PREFILL:
        return prefill_worker.rank.build(context)
    return decode_worker.rank.build(context)


def build_follower(context: FollowerContext) -> FollowerDesk:
    """Makes what another rank is in the role that it has now."""
    if context.config.role is Role.PREFILL:
        return prefill_worker.rank.build_follower(context)
    return decode_worker.rank.build_follower(context)


if __name__ == "__main__":
    sys.exit(run_rank(build, build_follower, describe_event))
