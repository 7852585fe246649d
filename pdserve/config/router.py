"""Settings of a router front."""

from dataclasses import dataclass, field
from itertools import combinations

from pdserve.config.log_level import LogLevel
from pdserve.errors import ConfigError

BRAIN_BEAT_S = 0.25
"""A front hears of its brain at least this often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """One router front."""

    model: str
    """Alias, GGUF file or folder, for the tokenizer and the chat template."""
    redis_url: str
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int = 8000
    """Of the OpenAI-compatible front; 0 takes a free one."""
    no_http: bool = False
    """True listens for gRPC alone."""
    strict_fields: bool = False
    """Unknown fields of HTTP requests are refused; else ignored, with one warning for each name."""
    metrics_port: int = 0
    cluster: str = "default"
    block_size: int = 16
    max_model_len: int | None = None
    local_prefill_tokens: int = 0
    """A decode worker prefills a prompt of which at most this much is uncached there; 0: never."""
    max_queued: int = 1024
    """Requests waiting for a place, of all fronts; one more is refused with RESOURCE_EXHAUSTED."""
    profiles: tuple[str, ...] = ()
    """Profile files that the predictor starts from; without any it learns from what it sees."""
    slo_classes: tuple[str, ...] = ()
    """`NAME=ttft_s:S,tpot_s:S,priority:N`: what requests of a class want."""
    max_in_flight: int = 4096
    """Likewise of requests that have not ended."""
    max_request_bytes: int = 16 * 1024 * 1024
    max_client_buffer_bytes: int = 256 * 1024
    """Buffered for a client that does not read; past it the request is cancelled alone."""
    max_attempts: int = 8
    worker_silence_s: float = 3.0
    """A worker whose stream says nothing for this long is dead to this router."""
    call_timeout_s: float = 5.0
    submit_timeout_s: float = 60.0
    """A busy worker takes a request between two steps; one that is dead is known by its stream."""
    registry_poll_s: float = 0.25
    pools_may_be_empty: bool = False
    """Healthy without a worker: something starts one when a request waits."""
    no_worker_wait_s: float = 15.0
    """How long a request waits for a pool that has no worker."""
    default_timeout_s: float | None = None
    drain_timeout_s: float = 60.0
    log_level: LogLevel = "info"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """`KEY` or `TENANT=KEY`; with any key set, calls without one are refused."""
    api_keys_file: str | None = None
    """Lines of `TENANT KEY`."""
    cluster_secret: str | None = field(default=None, repr=False)
    """Salts the caches of tenants; routers with another one share no cache. None draws one."""
    fronts: int = 1
    """Processes that share the ports; more than one share a brain, which is one more process."""
    brain_socket: str | None = None
    """Where the brain is; None: in this process. Set by whatever starts several fronts."""
    front_number: int = 0
    """Among the fronts that share a brain."""
    brain_silence_s: float = 1.5
    """A brain that says nothing for this long is given up, and connected to anew."""

    def __post_init__(self) -> None:
        """Checks what cannot be found out later.

        Raises:
            ConfigError: a number is out of range.
        """
        check_ports_differ(
            port=self.port,
            http_port=None if self.no_http else self.http_port,
            metrics_port=self.metrics_port,
        )
        if self.fronts < 1:
            raise ConfigError(f"fronts must be at least 1, got {self.fronts}", settings=("fronts",))
        if self.brain_silence_s <= BRAIN_BEAT_S:
            raise ConfigError(
                f"brain_silence_s must be over {BRAIN_BEAT_S}, got {self.brain_silence_s}",
                settings=("brain_silence_s",),
            )


def check_ports_differ(*, port: int, http_port: int | None, metrics_port: int) -> None:
    """Checks that a router's listeners do not want one port; 0 is any that is free.

    Raises:
        ConfigError: two of them do.
    """
    given = {"port": port, "http_port": http_port, "metrics_port": metrics_port}
    for (one, first), (other, second) in combinations(given.items(), 2):
        if first and first == second:
            raise ConfigError(
                f"{other} must differ from {one}, got {second} for both", settings=(other, one)
            )
