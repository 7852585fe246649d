import json
from pathlib import Path

from pdserve.engine.batch import SequenceSlice, StepPlan, StepResult
from pdserve.rank.inbox import Inbox
from pdserve.rank.spans import SpanEngine, SpanRunner, post_noter
from pdserve.request import BlockId
from pdserve.rpc.v1 import rank_pb2
from pdserve.spans import Detail, SpanFile
from pdserve.timeline import ManualClock
from tests.support.scheduling import make_request


class OverStep:
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def result(self) -> StepResult:
        return StepResult(sampled={})


class SpanList:
    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float, dict[str, Detail]]] = []

    def note(self, name: str, start_s: float, end_s: float, **details: Detail) -> None:
        self.spans.append((name, start_s, end_s, details))


class SlowRunner:
    max_steps_in_flight = 2

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def launch(self, plan: StepPlan) -> OverStep:
        self._clock.advance(0.25)
        return OverStep()


class SlowEngine:
    awaited = None

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def handle(self, event: object) -> None:
        self._clock.advance(0.5)

    def tick(self) -> None:
        """Does nothing."""

    def step(self) -> bool:
        return False

    def pause_s(self) -> float:
        return 1.0

    def describe(self) -> rank_pb2.RankHeartbeat:
        return rank_pb2.RankHeartbeat()

    def close(self) -> None:
        """Holds nothing."""


def describe(event: object) -> dict[str, Detail]:
    return {"event": event} if isinstance(event, str) else {}


def test_a_step_is_noted_from_its_launch_to_its_result_with_its_requests() -> None:
    clock, spans = ManualClock(), SpanList()
    part = SequenceSlice(
        request=make_request("r", 3),
        start=0,
        token_ids=(1, 2, 3),
        block_ids=(BlockId(0),),
        output_index=0,
    )
    runner = SpanRunner(SlowRunner(clock), spans, clock)
    assert runner.max_steps_in_flight == 2
    pending = runner.launch(StepPlan(slices=(part,)))
    assert pending.is_over()
    pending.wait()
    clock.advance(1.0)
    pending.result()
    details = {"requests": ["r"], "num_tokens": 3}
    assert spans.spans == [("launch", 0.0, 0.25, details), ("step", 0.0, 1.25, details)]


def test_an_event_is_noted_when_it_is_posted_and_when_it_is_taken() -> None:
    clock, spans = ManualClock(), SpanList()
    inbox = Inbox(post_noter(describe, spans, clock))
    engine = SpanEngine(SlowEngine(clock), describe, spans, clock)
    inbox.post("frame")
    inbox.post(7)
    clock.advance(1.0)
    for event in inbox.drain(0.0):
        engine.handle(event)
    assert spans.spans == [
        ("posted", 0.0, 0.0, {"event": "frame"}),
        ("handle", 1.0, 1.5, {"event": "frame"}),
    ]


def test_spans_are_in_the_file_at_once(tmp_path: Path) -> None:
    log = SpanFile(tmp_path / "new", "decode-0-rank0")
    log.note("scatter", 1.0, 2.5, frame=3, requests=["a"])
    log.note("step", 2.5, 2.5)
    lines = (tmp_path / "new" / "decode-0-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "process": "decode-0-rank0",
            "name": "scatter",
            "start_s": 1.0,
            "end_s": 2.5,
            "frame": 3,
            "requests": ["a"],
        },
        {"process": "decode-0-rank0", "name": "step", "start_s": 2.5, "end_s": 2.5},
    ]
