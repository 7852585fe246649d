"""What some steps and hand-offs took, for the router's predictor: a few of each kind a report.

A step takes the time from its launch, or from the end of the step before it, to its own end.
"""

import time
from collections import deque

from pdserve.engine.batch import PendingStep, StepPlan, StepRunner
from pdserve.engine.step_log import StepLog
from pdserve.predictor.predictor import DecodeSample, PrefillSample
from pdserve.rpc.v1 import types_pb2
from pdserve.timeline import Clock


class StepSamples:
    """Keeps the latest samples of each kind until they are reported. Engine thread only."""

    def __init__(self, clock: Clock) -> None:
        """Has none."""
        self._clock = clock
        self._since_s = 0.0
        """Since when the oldest step in flight has had the device."""
        self._num_in_flight = 0
        self._num_reports = 0
        self._log = StepLog()

    def note_launch(self) -> None:
        """Notes that a step is launched now."""
        if not self._num_in_flight:
            self._since_s = self._clock.now()
        self._num_in_flight += 1

    def note_end(self, plan: StepPlan) -> None:
        """Notes the end of the oldest step."""
        now_s = self._clock.now()
        seconds, self._since_s = now_s - self._since_s, now_s
        self._num_in_flight -= 1
        self._log.note(plan, seconds)

    def report_into(
        self, load: types_pb2.WorkerLoad, transfers: deque[tuple[int, float]] | None = None
    ) -> None:
        """Numbers a report, and moves all samples into it: of steps, and (bytes, seconds)."""
        self._num_reports += 1
        load.report = self._num_reports
        load.samples.extend(_to_wire(sample) for sample in self._log.take())
        while transfers:
            num_bytes, seconds = transfers.popleft()
            transfer = types_pb2.Transfer(num_bytes=num_bytes)
            load.samples.append(types_pb2.StepSample(seconds=seconds, transfer=transfer))


def _to_wire(sample: PrefillSample | DecodeSample) -> types_pb2.StepSample:
    if isinstance(sample, PrefillSample):
        prefill = types_pb2.PrefillStep(
            num_tokens=sample.num_tokens, num_context_tokens=sample.num_context_tokens
        )
        return types_pb2.StepSample(seconds=sample.seconds, prefill=prefill)
    decode = types_pb2.DecodeStep(
        num_sequences=sample.num_sequences, num_kv_tokens=sample.num_kv_tokens
    )
    return types_pb2.StepSample(seconds=sample.seconds, decode=decode)


class SampledRunner:
    """A `StepRunner` whose steps are timed."""

    def __init__(self, runner: StepRunner, samples: StepSamples, delay_s: float = 0.0) -> None:
        """Wraps a runner; a delay that is injected counts as part of its steps."""
        self._runner = runner
        self._samples = samples
        self._delay_s = delay_s

    @property
    def max_steps_in_flight(self) -> int:
        """As of the runner."""
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launches a step; one that is computed here and now is timed from before that."""
        self._samples.note_launch()
        if self._delay_s:
            time.sleep(self._delay_s)
        return self._runner.launch(plan)
