"""A decode scheduler with a fake runner behind it, and prompts whose KV lands at once."""

from decode_worker.admission import Grant, Refusal
from decode_worker.occupancy import LetGo
from decode_worker.progress import DecodeProgress
from decode_worker.scheduler import DecodeScheduler
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId, Request, RequestId
from pdserve.timeline import ManualClock
from tests.support.scheduling import FakeRunner, expected_output, make_config

BLOCK_SIZE = 4


class DecodeBench:
    """Steps a decode scheduler and keeps what it made."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        max_waiting: int = 64,
        max_local_prefill_tokens: int | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.runner = FakeRunner(BLOCK_SIZE)
        self.scheduler = DecodeScheduler(
            make_config(
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
            ),
            num_blocks,
            "revision",
            self.clock,
            max_waiting=max_waiting,
            max_local_prefill_tokens=max_local_prefill_tokens,
        )
        self.outputs: dict[RequestId, dict[int, int]] = {}
        self.finished: dict[RequestId, DecodeProgress] = {}
        self.let_go: list[LetGo] = []

    def reserve(self, request: Request) -> Grant:
        answer = self.scheduler.reserve(request)
        assert isinstance(answer, Grant), answer
        return answer

    def refuse(self, request: Request) -> Refusal:
        answer = self.scheduler.reserve(request)
        assert isinstance(answer, Refusal), answer
        return answer

    def land(self, request: Request, grant: Grant) -> None:
        """Computes the prompt elsewhere, ships what is not cached and lets it run."""
        length = len(request.token_ids)
        elsewhere = FakeRunner(BLOCK_SIZE)
        blocks = tuple(BlockId(block) for block in range(-(-length // BLOCK_SIZE)))
        part = SequenceSlice(
            request=request,
            start=0,
            token_ids=request.token_ids,
            block_ids=blocks,
            output_index=request.num_emitted,
        )
        result = elsewhere.run(StepPlan(slices=(part,)))
        first = result.sampled[request.request_id].token_id
        assert first == expected_output(request)[request.num_emitted]
        self.runner.receive(
            elsewhere, blocks, grant.block_ids, range(grant.num_cached_tokens, length)
        )
        self.outputs.setdefault(request.request_id, {})[request.num_emitted] = first
        self.scheduler.start(request.request_id, request.attempt, {0: first})

    def run_landed(self, request: Request) -> Grant:
        grant = self.reserve(request)
        self.land(request, grant)
        return grant

    def step(self) -> tuple[DecodeProgress, ...]:
        has_work = self.scheduler.has_work
        plan = self.scheduler.plan_step()
        self.let_go.extend(self.scheduler.take_let_go())
        self.scheduler.check()
        assert (plan is not None) == has_work
        self.clock.advance(0.01)
        if plan is None:
            return ()
        progress = self.scheduler.complete_step(plan, self.runner.run(plan))
        self.scheduler.check()
        for entry in progress:
            output = self.outputs.setdefault(entry.request_id, {})
            assert entry.output_index not in output, "an output index was made twice"
            output[entry.output_index] = entry.token.token_id
            if entry.finish_reason is not None:
                self.finished[entry.request_id] = entry
        return progress

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("still at work")

    def output_of(self, request: Request) -> tuple[int, ...]:
        output = self.outputs[request.request_id]
        return tuple(output[index] for index in range(len(output)))

    def assert_idle(self) -> None:
        self.scheduler.check()
        ledger = self.scheduler.ledger()
        assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks
        assert (ledger.sequences, ledger.reservations) == (0, 0)
