"""A runner of numbers with several steps in flight, and a decode worker's restless client.

A launched step is computed at once or only when its result is asked for, as the dice fall: a block
that is freed, filled or written too early shows either way. Before a slice is computed, all the KV
that attention would read is compared with what the sequence's own tokens give.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from decode_worker.admission import Grant
from decode_worker.scheduler import DecodeScheduler
from pdserve.engine.batch import SequenceSlice, StepPlan, StepResult, lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.engine.scheduler import Stage
from pdserve.errors import Overloaded
from pdserve.request import BlockId, Request, RequestId, SampledToken
from pdserve.timeline import ManualClock
from tests.support.scheduling import (
    FakeRunner,
    continue_request,
    digest_of,
    expected_output,
    make_config,
)

BLOCK_SIZE = 4


@dataclass(eq=False)
class _Flying:
    runner: "FlyingRunner"
    plan: StepPlan
    outcome: StepResult | None = None

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        """Computed by `result`."""

    def result(self) -> StepResult:
        return self.runner.end(self)


@dataclass
class FlyingRunner:
    """The `StepRunner` of a device that works steps off in order, when it likes."""

    rng: random.Random
    max_steps_in_flight: int = 2
    feeds_tokens: bool = True
    fake: FakeRunner = field(default_factory=lambda: FakeRunner(BLOCK_SIZE))
    num_awaited: int = 0
    max_seen_in_flight: int = 0
    share_computed_at_launch: float = 0.5
    _flying: deque[_Flying] = field(default_factory=deque)
    _last_sampled: dict[RequestId, SampledToken] = field(default_factory=dict)
    _tokens: dict[tuple[RequestId, int], list[int]] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> _Flying:
        assert len(self._flying) < self.max_steps_in_flight
        self._check_awaits(plan)
        step = _Flying(self, plan)
        self._flying.append(step)
        self.max_seen_in_flight = max(self.max_seen_in_flight, len(self._flying))
        if self.rng.random() < self.share_computed_at_launch:
            for earlier in self._flying:
                self._compute(earlier)
        return step

    def end(self, step: _Flying) -> StepResult:
        assert self._flying[0] is step, "results are taken in the order of the launches"
        self._compute(step)
        self._flying.popleft()
        assert step.outcome is not None
        return step.outcome

    def receive(
        self, source: FakeRunner, source_blocks: Iterable[int], blocks: Iterable[int], part: range
    ) -> None:
        """Lets KV land: nothing in flight may use its blocks."""
        table = tuple(BlockId(block) for block in blocks)
        landing = {table[position // BLOCK_SIZE] for position in part}
        assert not landing & self.blocks_in_use(), "KV lands in a block of a step in flight"
        self.fake.receive(source, tuple(BlockId(one) for one in source_blocks), table, part)

    def blocks_in_use(self) -> set[BlockId]:
        used: set[BlockId] = set()
        for step in self._flying:
            for part in step.plan.slices:
                used.update(part.block_ids)
            for pair in step.plan.copies:
                used.update(pair)
        return used

    def _check_awaits(self, plan: StepPlan) -> None:
        for part in plan.slices:
            givers = [
                one
                for step in self._flying
                for one in step.plan.slices
                if one.request is part.request and one.output_index is not None
            ]
            if not part.awaits_token:
                assert not givers, "its next token is in flight"
                continue
            assert self.feeds_tokens
            self.num_awaited += 1
            assert 1 <= len(givers) <= 2, "one unknown token at most is awaited"
            giver = givers[-1]
            assert giver.is_awaitable
            assert giver.end == part.end - 1
            assert giver.output_index is not None
            assert part.output_index == giver.output_index + 1
            assert part.output_index < part.request.sampling.max_tokens

    def _compute(self, step: _Flying) -> None:
        if step.outcome is not None:
            return
        slices = tuple(self._resolve(part) for part in step.plan.slices)
        self._copy_first(step.plan)
        for part in slices:
            self._check_history(part)
        step.outcome = self.fake.run(StepPlan(slices=slices))
        self._last_sampled |= step.outcome.sampled

    def _copy_first(self, plan: StepPlan) -> None:
        for source, target in plan.copies:
            for offset in range(BLOCK_SIZE):
                self.fake.slots[target, offset] = self.fake.slots.get((source, offset), -7)

    def _resolve(self, part: SequenceSlice) -> SequenceSlice:
        if not part.awaits_token:
            return part
        token = self._last_sampled[part.request.request_id].token_id
        return replace(part, token_ids=(*part.token_ids, token), awaits_token=False)

    def _check_history(self, part: SequenceSlice) -> None:
        request = part.request
        tokens = self._tokens.setdefault(
            (request.request_id, request.attempt), list(request.token_ids)
        )
        assert part.start <= len(tokens), "a token was skipped"
        tokens[part.start : part.end] = part.token_ids
        digest = 0
        for position, token in enumerate(tokens[: part.start]):
            digest = digest_of(digest, token)
            slot = part.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE
            assert self.fake.slots.get(slot) == digest, f"{request.request_id}: KV of {position}"


@dataclass
class Pending:
    """A request and where it stands with the worker."""

    request: Request
    grant: Grant | None = None
    wants_handoff: bool = False


class FlyingBench:
    """A decode scheduler behind the pipeline, and the tokens that its clients got."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        seed: int = 0,
        max_steps_in_flight: int = 2,
        num_stages: int = 1,
        share_computed_at_launch: float = 0.5,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.runner = FlyingRunner(
            self.rng,
            max_steps_in_flight,
            feeds_tokens=max_steps_in_flight > num_stages,
            share_computed_at_launch=share_computed_at_launch,
        )
        self.scheduler = DecodeScheduler(
            make_config(
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
            ),
            num_blocks,
            "revision",
            self.clock,
            max_waiting=64,
            max_local_prefill_tokens=None,
            lookahead=lookahead_of(self.runner, num_stages),
        )
        self.pipeline = StepPipeline(self.runner, self._plan)
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: set[RequestId] = set()
        self.cancelled: set[RequestId] = set()
        self.base: dict[RequestId, Request] = {}
        self.to_place: list[Pending] = []
        self.num_let_go = 0
        self.num_tokens = 0

    def add(self, request: Request, *, wants_handoff: bool = False) -> None:
        for one in request.samples():
            self.base[one.request_id] = one
            self.outputs[one.request_id] = []
        self.to_place.append(Pending(request, wants_handoff=wants_handoff))

    @property
    def live(self) -> list[RequestId]:
        gone = self.ended | self.cancelled
        return [request_id for request_id in self.base if request_id not in gone]

    def cancel(self, request_id: RequestId) -> None:
        """Cancels a sample; one that has not parted from its group goes with all of it."""
        for pending in list(self.to_place):
            samples = pending.request.samples()
            if any(one.request_id == request_id for one in samples):
                self.to_place.remove(pending)
                self.scheduler.cancel(pending.request.request_id)
                self.cancelled.update(one.request_id for one in samples)
                return
        for request in self.scheduler.requests():
            ids = [one.request_id for one in request.samples()]
            if request_id in ids:
                self.scheduler.cancel(request.request_id)
                self.cancelled.update(ids)
        self.scheduler.check()

    def turn(self) -> bool:
        """Places what waits, ends one step; says whether anything moved."""
        self.clock.advance(0.01)
        moves = [self._place(pending) for pending in list(self.to_place)]
        return self.step() or any(moves)

    def step(self) -> bool:
        ended = self.pipeline.turn()
        self._check_in_use()
        if ended is None:
            return False
        live = {part.request.request_id for part in self.scheduler.live_slices(ended.plan)}
        for progress in self.scheduler.complete_step(ended.plan, ended.result):
            name = progress.request_id
            assert name in live or name.rpartition("#")[0] in live
            assert name not in self.ended | self.cancelled, "a token leaked"
            assert progress.output_index == len(self.outputs[name])
            self.outputs[name].append(progress.token.token_id)
            self.num_tokens += 1
            if progress.finish_reason is not None:
                self.ended.add(name)
        self._check_in_use()
        return True

    def run(self, max_turns: int = 5000) -> None:
        for _ in range(max_turns):
            if not self.turn() and not self.to_place:
                return
        raise AssertionError("still at work")

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan_step()
        for let_go in self.scheduler.take_let_go():
            self.num_let_go += 1
            self._come_back(let_go.request, let_go.stage, let_go.next_index)
        return plan

    def _check_in_use(self) -> None:
        """What a step in flight uses is referenced: neither free nor about to be evicted."""
        self.scheduler.check()
        pool = self.scheduler._occupancy.cache.pool
        assert all(pool.num_references(block) for block in self.runner.blocks_in_use())

    def _come_back(self, request: Request, stage: Stage, next_index: int) -> None:
        if stage is Stage.RESERVED:
            self.to_place.append(Pending(request, wants_handoff=True))
            return
        emitted = tuple(self.outputs[request.samples()[0].request_id])
        assert next_index == len(emitted)
        self.to_place.append(Pending(continue_request(request, emitted)))

    def _place(self, pending: Pending) -> bool:
        request = pending.request
        if not pending.wants_handoff:
            try:
                self.scheduler.submit_local(request)
            except Overloaded:
                return False
            self.to_place.remove(pending)
            return True
        if pending.grant is None:
            answer = self.scheduler.reserve(request)
            pending.grant = answer if isinstance(answer, Grant) else None
            return pending.grant is not None
        if self.scheduler.stage_of(request.request_id) is not Stage.RESERVED:
            self.to_place.remove(pending)  # let go meanwhile, and back in the list anew
            return True
        if self.rng.random() < 0.5:
            self.to_place.remove(pending)
            self.land(request, pending.grant)
        return True

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
        self.runner.receive(
            elsewhere, blocks, grant.block_ids, range(grant.num_cached_tokens, length)
        )
        tokens = {}
        for one in request.samples():
            token = result.sampled[one.request_id].token_id
            self.outputs[one.request_id].append(token)
            if len(self.outputs[one.request_id]) == len(expected_output(self.base[one.request_id])):
                self.ended.add(one.request_id)
            else:
                tokens[one.sample_index] = token
        if tokens:
            self.scheduler.start(request.request_id, request.attempt, tokens)
        else:
            self.scheduler.release_reservation(request.request_id, request.attempt)

    def assert_all_done(self) -> None:
        """Every client that stayed has its own tokens, and every block is back."""
        for request_id, request in self.base.items():
            output, expected = tuple(self.outputs[request_id]), expected_output(request)
            if request_id in self.cancelled:
                assert output == expected[: len(output)]
            else:
                assert output == expected
        assert self.scheduler.counters.generation_tokens == self.num_tokens
        self.assert_idle()

    def assert_idle(self) -> None:
        self.scheduler.check()
        ledger = self.scheduler.ledger()
        assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks
        assert (ledger.sequences, ledger.reservations) == (0, 0)
