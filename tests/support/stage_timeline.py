"""A pipeline of real processes over Gloo, and when each stage computed each step.

`python -m tests.support.stage_timeline MODEL STAGES RANK FOLDER` is one of its stages.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan
from pdserve.engine.model_runner import ModelRunner
from pdserve.layers.parallel import Arriving, StageLink
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from pdserve.rank.gloo_groups import connect_stages
from pdserve.rank.loading import make_device_shard
from pdserve.rank.meeting import FolderMeeting
from tests.support.generation import make_request, make_slice

NUM_STEPS = 12
CHUNK_TOKENS = 64
TIMEOUT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a stage computed a step, once it had the activations for it."""

    stage: int
    step: int
    began_s: float
    ended_s: float

    def overlaps(self, other: "Span") -> bool:
        return self.began_s < other.ended_s and other.began_s < self.ended_s


class TimedLink:
    """A `StageLink` that notes when activations came."""

    def __init__(self, link: StageLink) -> None:
        self._link = link
        self.received_s: float | None = None

    def receive(self, num_rows: int, num_columns: int) -> Tensor:
        x = self._link.receive(num_rows, num_columns)
        self.received_s = time.monotonic()
        return x

    def send(self, x_MN: Tensor) -> None:  # noqa: N803
        self._link.send(x_MN)

    def expect_logits(self, num_rows: int, num_columns: int) -> Arriving:
        return self._link.expect_logits(num_rows, num_columns)

    def send_logits(self, logits: Tensor) -> None:
        self._link.send_logits(logits)


def make_plans() -> list[StepPlan]:
    """Chunks of one prompt; the last one samples."""
    tokens = tuple(7 * index % 380 for index in range(CHUNK_TOKENS * NUM_STEPS))
    request = make_request(tokens)
    ends = range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS)
    blocks = range(len(tokens) // 16)
    return [
        StepPlan(slices=(make_slice(request, tokens, end - CHUNK_TOKENS, end, blocks),))
        for end in ends
    ]


def play(model: Path, num_stages: int, folder: Path) -> list[Span]:
    """Computes a prompt in as many processes as there are stages."""
    argv = [sys.executable, "-m", "tests.support.stage_timeline", str(model), str(num_stages)]
    processes = [subprocess.Popen([*argv, str(rank), str(folder)]) for rank in range(num_stages)]
    for process in processes:
        assert process.wait(TIMEOUT_S) == 0
    return [
        Span(**span)
        for rank in range(num_stages)
        for span in json.loads((folder / f"spans-{rank}").read_text())
    ]


def main() -> None:
    """Lives as one stage."""
    model, num_stages, rank, folder = sys.argv[1:]
    torch.set_num_threads(1)
    engine = EngineConfig(model=model, max_model_len=1024, pipeline_parallel=int(num_stages))
    config = read_model_config(Path(model))
    geometry = geometry_of(config, engine)
    part = geometry.parts[int(rank)]
    meeting = FolderMeeting(Path(folder))
    found = connect_stages(meeting, part, 1, int(num_stages), torch.float32, "127.0.0.1")
    assert found is not None
    link = TimedLink(found)
    shard = replace(make_device_shard(config, geometry, int(rank)), is_exact=True, stages=link)
    kv = KvTensors(geometry, CHUNK_TOKENS * NUM_STEPS // 16, part)
    runner = ModelRunner(load_model(Path(model), engine, shard), kv)
    spans: list[Span] = []
    for _ in range(2):  # the first round warms up
        spans.clear()
        steps = []
        for step, plan in enumerate(make_plans()):
            launched_s = time.monotonic()
            if int(rank) == 0:
                steps.append(runner.launch(plan))
            else:
                runner.compute(plan)
            began_s = launched_s if link.received_s is None else link.received_s
            spans.append(
                Span(stage=int(rank), step=step, began_s=began_s, ended_s=time.monotonic())
            )
        for pending in steps:
            pending.result()
    (Path(folder) / f"spans-{rank}").write_text(json.dumps([asdict(span) for span in spans]))


if __name__ == "__main__":
    main()
