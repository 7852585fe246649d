"""Computes on this machine's processor."""

from pdserve.cache.kv_tensors import KvTensors
from pdserve.engine.model_runner import ModelRunner
from pdserve.errors import ConfigError
from pdserve.models.registry import load_model
from pdserve.rank.backend import (
    Announce,
    LoadedParts,
    LoadJob,
    RankRunner,
    ReportPhase,
    StepResults,
)
from pdserve.timeline import Clock

DEFAULT_KV_BYTES = 512 * 1024 * 1024


class CpuBackend:
    """The `Backend` without a GPU."""

    def load(self, job: LoadJob, clock: Clock, report: ReportPhase) -> LoadedParts:
        """Loads the model, then allocates as many blocks as the settings give bytes for."""
        started_s = clock.now()
        model = load_model(job.folder, job.engine, job.shard)
        report("load weights", clock.now() - started_s, job.engine.dtype)
        started_s = clock.now()
        num_blocks = _num_blocks(job)
        kv = KvTensors(job.geometry, num_blocks, job.part)
        room = num_blocks * job.geometry.block_size
        report("allocate KV", clock.now() - started_s, f"{room} tokens in {num_blocks} blocks")

        def make_runner(announce: Announce | None, results: StepResults | None) -> RankRunner:
            return ModelRunner(model, kv, announce)

        return LoadedParts(kv=kv, make_runner=make_runner)


def _num_blocks(job: LoadJob) -> int:
    """Returns how many blocks fit on the rank that holds most of each; all ranks have as many."""
    kv_bytes = job.engine.kv_cache_memory_bytes or DEFAULT_KV_BYTES
    block_bytes = max(job.geometry.bytes_per_block_on(part) for part in job.geometry.parts)
    num_blocks = kv_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes must be at least {2 * block_bytes} bytes (two KV blocks), "
            f"got {kv_bytes}",
            settings=("kv_cache_memory_bytes",),
        )
    return num_blocks
