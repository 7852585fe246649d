"""A stream of prompts of one length, computed and handed off as a prefill rank does it.

Two steps in flight, a prompt each. Frames are ordered when their step is launched, where its layers
are marked, or when it has ended; a launch gives way to the links of the prompt before.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.gpu_harness import Stand, make_prompt, make_request
from kv_transfer.events import FrameSent
from kv_transfer.shipping import ShipFrame
from pdserve.cache.kv_marks import KvMarks
from pdserve.engine.batch import StepPlan
from pdserve.engine.pipeline import StepPipeline
from pdserve.rank.inbox import Inbox
from pdserve.rank.step_waiter import StepOver, StepWaiter
from pdserve.request import BlockId, RequestId
from pdserve.timeline import MonotonicClock
from prefill_worker.engine import LINK_HEAD_START_S
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.shipments import Shipments

EVENT_TIMEOUT_S = 20.0

MakeOrders = Callable[[int, tuple[BlockId, ...], int | None], list[ShipFrame]]
"""Of a prompt's number, its blocks, and the step that computes them if that is in flight."""


class PromptStream:
    """The prompts of one measurement."""

    def __init__(  # noqa: PLR0913 - where the parts meet
        self,
        stand: Stand,
        inbox: Inbox,
        *,
        num_tokens: int,
        num_prompts: int,
        seed: int,
        make_orders: MakeOrders | None,
        ship: Callable[[list[ShipFrame]], None],
        marks: KvMarks | None,
    ) -> None:
        """Queues all of them.

        Args:
            stand: the engine.
            inbox: gets what links report.
            num_tokens: of each prompt.
            num_prompts: how many.
            seed: of their tokens.
            make_orders: makes a prompt's frames; None: nothing is handed off.
            ship: takes as many orders off a list as links have room for.
            marks: in the engine's steps; None: frames are ordered when their step has ended.
        """
        clock = MonotonicClock()
        engine = replace(
            stand.engine, max_num_batched_tokens=num_tokens, enable_prefix_caching=False
        )
        self._scheduler = PrefillScheduler(
            engine, stand.num_blocks, "bench", clock, max_waiting=num_prompts, look_ahead=4
        )
        numbers = random.Random(seed)
        for index in range(num_prompts):
            prompt = make_prompt(numbers, num_tokens, stand.vocab_size)
            self._scheduler.submit(make_request(str(index), prompt, 2))
        self._inbox = inbox
        self._num_prompts = num_prompts
        self._make_orders = make_orders
        self._take_orders = ship
        self._marks = marks
        self._shipments = Shipments(clock)
        self._queue: list[ShipFrame] = []
        self._ends_s: list[float] = []
        self._pipeline = StepPipeline(stand.runner, self._scheduler.plan_step, self._note_launched)

    def run(self) -> list[float]:
        """Computes and hands off all of them; returns when each prompt's step had ended."""
        waiter = StepWaiter(self._inbox.post)
        while len(self._ends_s) < self._num_prompts or self._shipments.since_s is not None:
            ended = self._pipeline.poll()
            if ended is not None:
                self._scheduler.complete_step(ended.plan, ended.result)
                self._note_end()
            elif self._pipeline.oldest is not None:
                waiter.watch(self._pipeline.oldest)
            self._take_sent(EVENT_TIMEOUT_S if ended is None else 0.0)
            if ended is not None:
                self._give_way()
        waiter.close()
        self._inbox.drain(0.0)
        return self._ends_s

    def table_of(self, index: int) -> tuple[BlockId, ...]:
        """Returns the blocks of a prompt; all keep theirs."""
        return self._scheduler.block_table(RequestId(str(index)), 1)

    def _note_launched(self, plan: StepPlan) -> None:
        if self._marks is not None:
            self._shipments.begin_step(self._marks.newest)
            self._ship(int(plan.slices[0].request.request_id), self._marks.newest)

    def _note_end(self) -> None:
        self._ends_s.append(time.monotonic())
        if self._marks is not None:
            self._shipments.end_step()
        else:
            self._ship(len(self._ends_s) - 1, None)

    def _ship(self, index: int, step: int | None) -> None:
        if self._make_orders is None:
            return
        orders = self._make_orders(index, self.table_of(index), step)
        for one in orders:
            self._shipments.add(one.reservation_id, one.frame_index, step)
        # As `FrameOutbox` has them: the first layers of all tokens are computed first.
        self._queue += sorted(orders, key=lambda one: one.region.layers.start if step else 0)
        self._take_orders(self._queue)

    def _give_way(self) -> None:
        """Waits for the frames of a step that has ended, for a moment."""
        until_s = time.monotonic() + LINK_HEAD_START_S
        while self._shipments.since_s is not None and (left_s := until_s - time.monotonic()) > 0:
            self._take_sent(left_s)

    def _take_sent(self, timeout_s: float) -> None:
        for event in self._inbox.drain(timeout_s):
            assert isinstance(event, FrameSent | StepOver), event
            if isinstance(event, FrameSent):
                self._shipments.sent(event.reservation_id, event.frame_index)
        self._take_orders(self._queue)
