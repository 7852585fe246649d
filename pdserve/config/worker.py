"""Settings of one worker: its engine, its hand-off, and where it listens."""

from dataclasses import dataclass, field
from typing import Literal

from pdserve.config.engine import EngineConfig
from pdserve.config.log_level import LogLevel
from pdserve.errors import ConfigError
from pdserve.request import Role

WireDtype = Literal["auto", "float32", "bfloat16", "fp8"]
MAX_RING_SLOTS = 32
TRANSPORTS = ("push", "nccl", "gloo")
"""All there are, the fastest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffConfig:
    """How KV moves from prefill to decode."""

    frame_tokens: int | None = None
    """Prompt tokens in one frame, a multiple of the block size; None: as many as fill 64 MiB on a
    GPU, 6 MiB on a CPU, with what one rank holds of them."""
    frame_layers: int | None = None
    """Layers in one frame of a long prompt, said by the decode worker: it leaves while later layers
    are computed. None: 8 on a GPU; on a CPU, whose steps are over at once, all that two ranks have
    in common."""
    layered_from_tokens: int = 1024
    """Prompts with so many tokens to send go in groups of layers; frames of shorter ones hold all
    layers: there, more frames cost more than they hide."""
    ring_slots: int = 4
    """Landing slots per link, at most 32; bounds the frames in flight."""
    transports: tuple[str, ...] = TRANSPORTS
    """What links may use, the preferred first. `push` needs two GPUs of one host, or one GPU,
    `nccl` two GPUs, `gloo` nothing; of each pair of ranks the decode worker chooses."""
    max_device_links: int = 4
    """Links of one rank that hold GPU memory; the least recently used one makes room."""
    nccl_max_ctas: int = 16
    """Thread blocks that one NCCL transfer may occupy."""
    pack_programs: int | None = None
    """Thread blocks that packing or unpacking a frame may occupy, beside steps as without them;
    None: one for each multiprocessor."""
    lease_s: float = 10.0
    """A reservation, or KV held for one, outlives its peer by this long."""
    look_ahead: int = 4
    """Queued requests that ask for their reservation before they are computed."""
    hold_s: float = 20.0
    """How long computed KV waits on prefill for a decode worker."""
    call_timeout_s: float = 5.0
    """Deadline of one control call: Reserve, Commit, Abort, Renew."""
    frame_timeout_s: float = 10.0
    """Deadline of one frame's transfer; a link that misses it is dead for good."""
    connect_timeout_s: float = 5.0
    has_checksums: bool = True
    joins_late: bool = True
    """While somebody's KV is on its way, a decode step is launched only shortly before the one in
    flight ends, so that what lands until then is in it."""
    wire_dtype: WireDtype = "auto"
    """Of the KV on the wire, said by the decode worker; auto: the narrower of both caches'. fp8
    halves the bytes of bfloat16 and rounds: e4m3, a scale for each head of each token."""

    def __post_init__(self) -> None:
        """Checks the order of transports, and limits.

        Raises:
            ConfigError: a transport is not known, named twice, or there is none; or a number is
                out of range.
        """
        wished = self.transports
        if not wished or len(set(wished)) < len(wished) or not set(wished) <= set(TRANSPORTS):
            raise ConfigError(
                f"transports must be some of {', '.join(TRANSPORTS)}, each once, "
                f"got {' '.join(wished)[:64]!r}",
                settings=("transports",),
            )
        if self.ring_slots > MAX_RING_SLOTS:
            raise ConfigError(
                f"ring_slots must be at most {MAX_RING_SLOTS}, got {self.ring_slots}",
                settings=("ring_slots",),
            )
        for name, value in (
            ("ring_slots", self.ring_slots),
            ("max_device_links", self.max_device_links),
            ("nccl_max_ctas", self.nccl_max_ctas),
            ("layered_from_tokens", self.layered_from_tokens),
            ("pack_programs", 1 if self.pack_programs is None else self.pack_programs),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", settings=(name,))


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultConfig:
    """Faults injected on purpose, for tests and drills. All off by default."""

    step_delay_s: float = 0.0
    """Added before each engine step."""
    frame_delay_s: float = 0.0
    """Added before each frame is sent."""
    corrupt_frame: int | None = None
    """Flips a bit in the n-th frame sent by this worker, after its checksum is taken."""
    corrupt_frame_silently: int | None = None
    """Flips all signs in the n-th frame before its checksum: only the output can show it."""
    commit_delay_s: float = 0.0
    """Added before each commit is sent."""
    reject_reservations: int = 0
    """Refuses the first n reservations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """One replica of a pool."""

    role: Role
    worker_id: str
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    metrics_port: int = 0
    redis_url: str
    cluster: str = "default"
    """Workers and routers of one cluster share this name in the registry."""
    max_waiting: int = 1024
    """Requests in the queue; one more is refused."""
    max_local_prefill_tokens: int | None = None
    """Prompt tokens a decode worker may compute for a request; None: any number, 0: none."""
    heartbeat_s: float = 0.5
    registry_lease_s: float = 3.0
    frozen_after_s: float = 5.0
    """No progress for this long with work queued means frozen."""
    orphan_grace_s: float = 20.0
    """Requests of a front that has had no stream for this long are cancelled."""
    drain_timeout_s: float = 60.0
    can_flip: bool = False
    """SIGUSR1 makes it drain and go on in the other pool, with its weights loaded."""
    spread_stages: bool = False
    """True: the face starts the first pipeline stage only; each other one is held by a `pdserve
    stage` on a node of its own, which the face finds in the registry."""
    stage_token: str | None = field(default=None, repr=False)
    """What a worker and its spread stages prove to each other that they have."""
    stage_silence_s: float = 5.0
    """A stage on another node is lost after so much silence, and the replica with it."""
    log_level: LogLevel = "info"
    span_folder: str | None = None
    """Where ranks write down how long each stage of a request takes; None: nowhere."""
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        """Checks that frames hold whole blocks and whole layers, and the range of times.

        Raises:
            ConfigError: frame_tokens is no multiple of block_size, or frame_layers or a time not
                positive.
        """
        if self.handoff.frame_layers is not None and self.handoff.frame_layers < 1:
            raise ConfigError(
                f"frame_layers must be at least 1, got {self.handoff.frame_layers}",
                settings=("frame_layers",),
            )
        if (self.handoff.frame_tokens or 0) % self.engine.block_size:
            raise ConfigError(
                f"frame_tokens must be a multiple of block_size {self.engine.block_size}, "
                f"got {self.handoff.frame_tokens}",
                settings=("frame_tokens", "block_size"),
            )
        if self.can_flip and self.has_remote_stages:
            raise ConfigError(
                "can_flip must be off with spread_stages", settings=("can_flip", "spread_stages")
            )
        if self.stage_silence_s <= 0:
            raise ConfigError(
                f"stage_silence_s must be above 0, got {self.stage_silence_s:g}",
                settings=("stage_silence_s",),
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those that it may have, the present one first."""
        others = tuple(role for role in Role if role is not self.role)
        return (self.role, *others) if self.can_flip else (self.role,)

    @property
    def has_remote_stages(self) -> bool:
        """Whether some ranks are on other nodes than the face."""
        return self.spread_stages and self.engine.pipeline_parallel > 1

    @property
    def num_local_ranks(self) -> int:
        """Ranks on the node of the face."""
        return self.engine.tensor_parallel if self.spread_stages else self.engine.num_ranks
