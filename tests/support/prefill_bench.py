"""A prefill scheduler with a fake runner behind it."""

from pdserve.timeline import ManualClock
from prefill_worker.scheduler import PrefillProgress, PrefillScheduler
from tests.support.scheduling import FakeRunner, make_config

BLOCK_SIZE = 4


class PrefillBench:
    """Steps a prefill scheduler."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        max_waiting: int = 64,
        look_ahead: int = 2,
        num_stages: int = 1,
    ) -> None:
        self.clock = ManualClock()
        self.runner = FakeRunner(BLOCK_SIZE)
        self.scheduler = PrefillScheduler(
            make_config(
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
            ),
            num_blocks,
            "revision",
            self.clock,
            max_waiting=max_waiting,
            look_ahead=look_ahead,
            num_stages=num_stages,
        )

    def step(self) -> tuple[PrefillProgress, ...]:
        has_work = self.scheduler.has_work
        plan = self.scheduler.plan_step()
        assert (plan is not None) == has_work
        self.clock.advance(1.0)
        progress = () if plan is None else self.scheduler.complete_step(plan, self.runner.run(plan))
        self.scheduler.check()
        return progress

    def run_until_held(self, name: str) -> PrefillProgress:
        for _ in range(200):
            for progress in self.step():
                if progress.request_id == name and progress.samples:
                    return progress
        raise AssertionError(f"{name} never got its token")

    def assert_idle(self) -> None:
        self.scheduler.check()
        ledger = self.scheduler.ledger()
        assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks
        assert (ledger.sequences, ledger.held_handoffs) == (0, 0)
