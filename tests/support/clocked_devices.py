"""Runners whose steps take the same time each, on a device with a clock of its own."""

from pathlib import Path

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import PendingStep, StepPlan, StepResult, StepRunner
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from pdserve.timeline import ManualClock
from tests.support.late_runner import LateRunner

STEP_S = 0.010


class DeviceStep:
    def __init__(self, pending: PendingStep, end_s: float, clock: ManualClock) -> None:
        self._pending = pending
        self._end_s = end_s
        self._clock = clock

    def is_over(self) -> bool:
        return self._clock.now() >= self._end_s

    def wait(self) -> None:
        self._clock.time_s = max(self._clock.time_s, self._end_s)

    def result(self) -> StepResult:
        self.wait()
        return self._pending.result()


class DeviceRunner:
    """Each step takes the same time on a device of its own, one after another."""

    max_steps_in_flight = 2

    def __init__(self, runner: StepRunner) -> None:
        self.clock = ManualClock()
        self.launched: list[StepPlan] = []
        self.ends_s: list[float] = []
        self._runner = runner

    def launch(self, plan: StepPlan) -> DeviceStep:
        self.launched.append(plan)
        self.ends_s.append(max([self.clock.now(), *self.ends_s[-1:]]) + STEP_S)
        return DeviceStep(self._runner.launch(plan), self.ends_s[-1], self.clock)


class Devices:
    """Makes ranks for an `EnginePair`, prefill first."""

    def __init__(self) -> None:
        self.runners: list[DeviceRunner] = []

    def make_rank(
        self, folder: Path, engine: EngineConfig, num_blocks: int
    ) -> tuple[KvTensors, StepRunner]:
        kv = KvTensors(geometry_of(read_model_config(folder), engine), num_blocks)
        runner = DeviceRunner(LateRunner(ModelRunner(load_model(folder, engine), kv)))
        self.runners.append(runner)
        return kv, runner
