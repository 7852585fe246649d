"""Settings of a whole cluster that one launcher starts."""

from dataclasses import dataclass, field

from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig, HandoffConfig
from pdserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """A router and two pools on this machine."""

    engine: EngineConfig
    num_prefill: int = 1
    """0 is the colocated mode: decode workers prefill for themselves."""
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 0
    redis_url: str | None = None
    """None starts a private redis-server on loopback."""
    served_model_name: str | None = None
    max_local_prefill_tokens: int | None = None
    max_client_buffer_bytes: int = 256 * 1024
    """As of RouterConfig: buffered for a client that does not read."""
    ready_timeout_s: float = 120.0
    drain_timeout_s: float = 60.0
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    prefill_faults: FaultConfig = field(default_factory=FaultConfig)
    decode_faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        """Checks pool sizes.

        Raises:
            ConfigError: a pool size is out of range.
        """
        if self.num_prefill < 0:
            raise ConfigError(f"prefill must be at least 0, got {self.num_prefill}")
        if self.num_decode < 1:
            raise ConfigError(f"decode must be at least 1, got {self.num_decode}")
