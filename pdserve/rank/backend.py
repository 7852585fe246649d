"""The seam between a rank and what computes: a CPU, or a CUDA GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdserve.cache.kv_marks import KvMarks
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.config.model import KvGeometry, ModelConfig
from pdserve.config.shape import RankPart
from pdserve.engine.batch import PendingStep, StepPlan, StepRunner
from pdserve.layers.parallel import Shard
from pdserve.rank.exchange import RankExchange
from pdserve.timeline import Clock

ReportPhase = Callable[[str, float, str], None]
"""Takes a phase that ended: its name, its seconds, and a detail."""
Announce = Callable[[StepPlan], None]
"""Tells the other ranks of a step that is about to be computed."""


class ExpectedResult(PendingStep, Protocol):
    """What rank 0 will be told of one step."""


class StepResults(Protocol):
    """The way of results to rank 0, where another rank samples: the last stage of a pipeline."""

    def put(self, step: PendingStep) -> None:
        """Sends a step's result once it has ended; on the rank that samples."""
        ...

    def expect(self) -> ExpectedResult:
        """Returns what the result of a step that is launched now will be; on rank 0."""
        ...


class RankRunner(StepRunner, Protocol):
    """A `StepRunner` as a rank makes it."""

    def warm_up(self) -> None:
        """Computes a prompt tile and a decode step, whose KV nobody will read."""
        ...

    def compute(self, plan: StepPlan) -> object:
        """Does this rank's part of a step that rank 0 samples for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadJob:
    """What to load."""

    folder: Path
    engine: EngineConfig
    model: ModelConfig
    geometry: KvGeometry
    part: RankPart
    shard: Shard | None
    """None for an only rank."""
    max_model_len: int
    link_bytes: int = 0
    """Of the device's memory that links may take later."""
    mark_layers: int | None = None
    """Marks stand behind so many layers of each step, for frames that leave meanwhile; None: no
    marks."""
    exchange: RankExchange | None = None
    """Of all ranks; None for an only rank, and on the CPU, where `shard` connects them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedParts:
    """A model, memory for its KV, and what runs steps over both."""

    kv: KvTensors
    make_runner: Callable[[Announce | None, StepResults | None], RankRunner]
    """Takes what tells other ranks of steps; and what takes results to rank 0, on both ends."""
    marks: KvMarks | None = None
    """In the steps of that runner; None on a CPU, whose steps are over when they are launched."""


class Backend(Protocol):
    """One kind of device."""

    def load(self, job: LoadJob, clock: Clock, report: ReportPhase) -> LoadedParts:
        """Loads a rank's part of the model and allocates its KV.

        Raises:
            ConfigError: something the user can mend.
        """
        ...
