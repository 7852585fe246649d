"""A pipeline of real processes over Gloo, and when each stage computed each step.

`python -m tests.support.stage_timeline MODEL STAGES RANK FOLDER IN_FLIGHT` is one of its stages.
"""

import json
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan
from pdserve.engine.model_runner import ComputedStep, ModelRunner
from pdserve.layers.parallel import Arriving, StageLink
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from pdserve.rank.gloo_groups import connect_stages
from pdserve.rank.loading import make_device_shard
from pdserve.rank.meeting import FolderMeeting
from tests.support.generation import make_request, make_slice

NUM_STEPS = 12
CHUNK_TOKENS = 64
BLOCKS_PER_STEP = CHUNK_TOKENS // 16
TIMEOUT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a stage computed a step: from having its activations until it hands the outcome on.

    What comes behind that, the sending, may graze the next step of a stage that only takes turns.
    """

    stage: int
    step: int
    began_s: float
    ended_s: float

    def overlaps(self, other: "Span") -> bool:
        return self.began_s < other.ended_s and other.began_s < self.ended_s


class TimedLink:
    """A `StageLink` that notes when activations came and when the outcome was there."""

    def __init__(self, link: StageLink) -> None:
        self._link = link
        self.received_s: float | None = None
        self.computed_s = 0.0

    def receive(self, num_rows: int, num_columns: int) -> Tensor:
        x = self._link.receive(num_rows, num_columns)
        self.received_s = time.monotonic()
        return x

    def send(self, x_MN: Tensor) -> None:  # noqa: N803
        self.computed_s = time.monotonic()
        self._link.send(x_MN)

    def expect_logits(self, num_rows: int, num_columns: int) -> Arriving:
        return self._link.expect_logits(num_rows, num_columns)

    def send_logits(self, logits: Tensor) -> None:
        self.computed_s = time.monotonic()
        self._link.send_logits(logits)


def make_plans() -> list[StepPlan]:
    """Prompts of a step each, all of which sample: rank 0 needs the logits of every step."""
    plans = []
    for step in range(NUM_STEPS):
        tokens = tuple((7 * index + step) % 380 for index in range(CHUNK_TOKENS))
        request = make_request(tokens, request_id=f"r{step}")
        blocks = range(step * BLOCKS_PER_STEP, (step + 1) * BLOCKS_PER_STEP)
        part = make_slice(request, tokens, 0, CHUNK_TOKENS, blocks)
        plans.append(StepPlan(slices=(part,)))
    return plans


def play(model: Path, num_stages: int, folder: Path, max_in_flight: int) -> list[Span]:
    """Computes steps in as many processes as there are stages."""
    folder.mkdir()
    argv = [sys.executable, "-m", "tests.support.stage_timeline", str(model), str(num_stages)]
    processes = [
        subprocess.Popen([*argv, str(rank), str(folder), str(max_in_flight)])
        for rank in range(num_stages)
    ]
    for process in processes:
        assert process.wait(TIMEOUT_S) == 0
    return [
        Span(**span)
        for rank in range(num_stages)
        for span in json.loads((folder / f"spans-{rank}").read_text())
    ]


def main() -> None:
    """Lives as one stage."""
    model, num_stages, rank, folder, max_in_flight = sys.argv[1:]
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
    kv = KvTensors(geometry, BLOCKS_PER_STEP * NUM_STEPS, part)
    runner = ModelRunner(load_model(Path(model), engine, shard), kv)
    spans: list[Span] = []
    for _ in range(2):  # the first round warms up
        spans.clear()
        flying: deque[ComputedStep] = deque()
        for step, plan in enumerate(make_plans()):
            if len(flying) == int(max_in_flight):
                flying.popleft().result()
            launched_s = time.monotonic()
            if int(rank) == 0:
                flying.append(runner.launch(plan))
            else:
                runner.compute(plan)
            began_s = launched_s if link.received_s is None else link.received_s
            spans.append(Span(stage=int(rank), step=step, began_s=began_s, ended_s=link.computed_s))
        for pending in flying:
            pending.result()
    (Path(folder) / f"spans-{rank}").write_text(json.dumps([asdict(span) for span in spans]))
    # What was sent is read while its sender lives.
    others = [Path(folder) / f"spans-{stage}" for stage in range(int(num_stages))]
    while not all(path.exists() for path in others):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
