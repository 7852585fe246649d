"""Settings of a whole cluster that one launcher starts."""

from dataclasses import dataclass, field, replace

from pdserve.config.engine import EngineConfig
from pdserve.config.load import PAIRS_FLAG, renaming
from pdserve.config.log_level import LogLevel
from pdserve.config.router import check_ports_differ
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """A router and two pools on this machine."""

    engine: EngineConfig
    num_prefill: int = 1
    """0 is the colocated mode: decode workers prefill for themselves."""
    num_decode: int = 1
    can_be_empty: bool = False
    """Pools may lose their last replica: the first request that waits brings one back."""
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    """Of the OpenAI-compatible front; 0 takes a free one."""
    no_http: bool = False
    """True listens for gRPC alone."""
    strict_fields: bool = False
    """As of RouterConfig."""
    metrics_port: int = 0
    fronts: int = 1
    """As of RouterConfig: processes that share the router's ports."""
    redis_url: str | None = None
    """None starts a private redis-server on loopback."""
    served_model_name: str | None = None
    decode_tensor_parallel: int | None = None
    """Of decode replicas; None takes the engine's."""
    decode_pipeline_parallel: int | None = None
    """Likewise."""
    max_local_prefill_tokens: int | None = None
    local_prefill_tokens: int = 0
    """A decode worker prefills a prompt of which at most this much is uncached there; 0: never."""
    profiles: tuple[str, ...] = ()
    """As of RouterConfig."""
    slo_classes: tuple[str, ...] = ()
    """Likewise."""
    max_queued: int = 1024
    """Likewise."""
    max_in_flight: int = 4096
    """Likewise."""
    max_client_buffer_bytes: int = 256 * 1024
    """As of RouterConfig: buffered for a client that does not read."""
    ready_timeout_s: float = 120.0
    drain_timeout_s: float = 60.0
    log_level: LogLevel = "info"
    """Of all children."""
    span_folder: str | None = None
    """As of WorkerConfig."""
    heartbeat_s: float = 0.5
    """Workers renew their place in the registry this often."""
    registry_lease_s: float = 3.0
    frozen_after_s: float = 5.0
    """No progress of a rank for this long, with work queued, means frozen."""
    can_flip: bool = False
    """Replicas can change their pool with their weights loaded."""
    spread_stages: bool = False
    """Pipeline stages behind the first are on nodes of their own; see WorkerConfig."""
    stage_token: str | None = field(default=None, repr=False)
    """As of WorkerConfig."""
    stage_silence_s: float = 5.0
    """Likewise."""
    orphan_grace_s: float = 20.0
    """Workers cancel requests whose router has been gone for this long."""
    worker_silence_s: float = 3.0
    """A worker whose stream says nothing for this long is dead to the router."""
    handoff: HandoffConfig = field(
        default_factory=HandoffConfig, metadata={PAIRS_FLAG: "--handoff"}
    )
    prefill_faults: FaultConfig = field(
        default_factory=FaultConfig, metadata={PAIRS_FLAG: "--prefill-fault"}
    )
    decode_faults: FaultConfig = field(
        default_factory=FaultConfig, metadata={PAIRS_FLAG: "--decode-fault"}
    )
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """`KEY` or `TENANT=KEY`; with any key set, calls without one are refused."""
    api_keys_file: str | None = None
    """Lines of `TENANT KEY`."""

    @property
    def decode_engine(self) -> EngineConfig:
        """The engine of decode replicas."""
        engine, tensor, stages = (
            self.engine,
            self.decode_tensor_parallel,
            self.decode_pipeline_parallel,
        )
        own = {
            name: f"decode_{name}"
            for name, value in (("tensor_parallel", tensor), ("pipeline_parallel", stages))
            if value is not None
        }
        with renaming(own):
            return replace(
                engine,
                tensor_parallel=engine.tensor_parallel if tensor is None else tensor,
                pipeline_parallel=engine.pipeline_parallel if stages is None else stages,
            )

    @property
    def flip_obstacle(self) -> str | None:
        """Why no replica could change its pool; None where it could."""
        prefill, decode = _shape_of(self.engine), _shape_of(self.decode_engine)
        if prefill != decode:
            return (
                f"decode replicas have another shape ({decode} ranks by "
                "--decode-tensor-parallel-size and --decode-pipeline-parallel-size) than "
                f"prefill replicas ({prefill})"
            )
        if self.spread_stages and self.engine.pipeline_parallel > 1:
            return "with --spread-stages a replica has stages on other nodes, which keep their role"
        return None

    def __post_init__(self) -> None:
        """Checks ports, pool sizes and numbers of ranks.

        Raises:
            ConfigError: one of them is out of range.
        """
        check_ports_differ(
            port=self.port,
            http_port=None if self.no_http else self.http_port,
            metrics_port=self.metrics_port,
        )
        if self.num_prefill < 0:
            raise ConfigError(
                f"num_prefill must be at least 0, got {self.num_prefill}", settings=("num_prefill",)
            )
        if self.fronts < 1:
            raise ConfigError(f"fronts must be at least 1, got {self.fronts}", settings=("fronts",))
        if self.num_decode < 1:
            raise ConfigError(
                f"num_decode must be at least 1, got {self.num_decode}", settings=("num_decode",)
            )
        # Asked in any case: it makes the engine of decode replicas, which has numbers of its own.
        obstacle = self.flip_obstacle
        if self.can_flip and obstacle is not None:
            raise ConfigError(f"can_flip must be off: {obstacle}", settings=("can_flip",))


def _shape_of(engine: EngineConfig) -> str:
    return f"{engine.tensor_parallel} x {engine.pipeline_parallel}"
