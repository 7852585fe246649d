"""The production schedulers of simulated workers."""

from decode_worker.scheduler import DecodeScheduler
from pdserve.cache.cached_granules import CachedGranules
from pdserve.config.engine import EngineConfig
from pdserve.engine.scheduler import ChainMaker
from pdserve.predictor.profile import Profile
from pdserve.timeline import Clock
from prefill_worker.scheduler import PrefillScheduler
from simulation.shape import ClusterShape

_REVISION = "simulated"


def make_prefill_scheduler(
    shape: ClusterShape, clock: Clock, make_chain: ChainMaker, granules: CachedGranules
) -> PrefillScheduler:
    """Makes that of a prefill worker, which tells its cache's changes."""
    profile = shape.prefill
    scheduler = PrefillScheduler(
        _engine_config(profile),
        profile.kv_tokens // profile.block_size,
        _REVISION,
        clock,
        max_waiting=shape.max_waiting,
        look_ahead=shape.look_ahead,
        make_chain=make_chain,
    )
    scheduler.tell_cached(granules)
    return scheduler


def make_decode_scheduler(
    shape: ClusterShape, clock: Clock, make_chain: ChainMaker, granules: CachedGranules
) -> DecodeScheduler:
    """Makes that of a decode worker, which tells its cache's changes."""
    profile = shape.decode
    scheduler = DecodeScheduler(
        _engine_config(profile),
        profile.kv_tokens // profile.block_size,
        _REVISION,
        clock,
        max_waiting=shape.max_waiting,
        max_local_prefill_tokens=None,
        make_chain=make_chain,
    )
    scheduler.tell_cached(granules)
    return scheduler


def _engine_config(profile: Profile) -> EngineConfig:
    return EngineConfig(
        model=profile.worker_class,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
    )
