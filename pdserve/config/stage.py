"""Settings of what holds one pipeline stage of a worker on a node of its own."""

from dataclasses import dataclass

from pdserve.config.log_level import LogLevel
from pdserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One stage; all else comes from the worker's face."""

    worker_id: str
    """Of the worker whose stage this is."""
    stage: int
    """1 or more: the first stage is where the face is."""
    model: str | None = None
    """As of EngineConfig, on this node; None takes the folder that the face names."""
    host: str = "127.0.0.1"
    """The one address of this node that every listener binds."""
    port: int = 0
    """Where the face connects; 0 takes a free one."""
    redis_url: str
    cluster: str = "default"
    stage_token: str | None = None
    """The same as the worker's."""
    heartbeat_s: float = 0.5
    """The stage renews its place in the registry this often."""
    registry_lease_s: float = 3.0
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        """Checks the stage.

        Raises:
            ConfigError: it is the first, or none.
        """
        if self.stage < 1:
            raise ConfigError(f"stage must be at least 1, got {self.stage}", settings=("stage",))
