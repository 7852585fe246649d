"""Both schedulers with a toy router and hand-off between them, in ticks of virtual time."""

import random
from dataclasses import dataclass, field

from decode_worker.admission import Grant
from decode_worker.scheduler import DecodeScheduler
from pdserve.engine.scheduler import Stage
from pdserve.errors import Overloaded
from pdserve.request import Request, RequestId
from pdserve.timeline import ManualClock
from prefill_worker.scheduler import PrefillScheduler
from tests.support.scheduling import FakeRunner, continue_request, make_config

BLOCK_SIZE = 4


@dataclass
class Client:
    """What the router knows of one request, and where its hand-off stands."""

    request: Request
    output: list[int] = field(default_factory=list)
    is_submitted: bool = False
    wants_place: bool = False
    grant: Grant | None = None
    is_computed: bool = False
    lands_in: int = 0
    is_done: bool = False
    num_preemptions: int = 0


class TwoPools:
    """One prefill and one decode scheduler; hand-offs land some ticks after both sides agree."""

    def __init__(self, rng: random.Random, prefill_blocks: int, decode_blocks: int) -> None:
        self.rng = rng
        config = make_config(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=rng.choice((7, 64, 100)),
            max_num_seqs=rng.choice((2, 4, 16)),
        )
        self.clock = ManualClock()
        self.prefill = PrefillScheduler(
            config, prefill_blocks, "r", self.clock, max_waiting=8, look_ahead=rng.choice((0, 4))
        )
        self.decode = DecodeScheduler(
            config, decode_blocks, "r", self.clock, max_waiting=8, max_local_prefill_tokens=0
        )
        self.prefill_runner = FakeRunner(BLOCK_SIZE)
        self.decode_runner = FakeRunner(BLOCK_SIZE)
        self.clients: dict[RequestId, Client] = {}

    def add(self, request: Request) -> None:
        self.clients[request.request_id] = Client(request)

    @property
    def live(self) -> list[Client]:
        return [client for client in self.clients.values() if not client.is_done]

    def tick(self) -> bool:
        """Takes everything one step on and says whether anything moved."""
        self.clock.advance(0.01)
        moves = [
            self._submit(),
            self._step_prefill(),
            self._place(),
            self._land(),
            self._step_decode(),
        ]
        self.prefill.check()
        self.decode.check()
        return any(moves)

    def cancel(self, client: Client) -> None:
        client.is_done = True
        self.prefill.cancel(client.request.request_id)
        self.decode.cancel(client.request.request_id)

    def _submit(self) -> bool:
        has_moved = False
        for client in self.live:
            if client.is_submitted:
                continue
            try:
                self.prefill.submit(client.request)
            except Overloaded:
                break
            client.is_submitted = has_moved = True
        return has_moved

    def _step_prefill(self) -> bool:
        plan = self.prefill.plan_step()
        for request in self.prefill.requests_in_window():
            self.clients[request.request_id].wants_place = True
        if plan is None:
            return False
        for progress in self.prefill.complete_step(plan, self.prefill_runner.run(plan)):
            if not progress.samples:
                continue
            client = self.clients[progress.request_id]
            assert progress.output_index == len(client.output)
            client.output.append(progress.samples[0].token.token_id)
            client.is_computed = True
            client.lands_in = self.rng.randint(0, 4)
            if progress.samples[0].finish_reason is not None:
                client.is_done = True
                self.prefill.release(progress.request_id, progress.attempt)
                self.decode.release_reservation(progress.request_id, progress.attempt)
        return True

    def _place(self) -> bool:
        has_moved = False
        for client in self.live:
            if client.wants_place and client.grant is None:
                answer = self.decode.reserve(client.request)
                if isinstance(answer, Grant):
                    client.grant = answer
                    has_moved = True
        return has_moved

    def _land(self) -> bool:
        has_moved = False
        for client in self.live:
            if client.grant is None or not client.is_computed:
                continue
            has_moved = True
            client.lands_in -= 1
            if client.lands_in > 0:
                continue
            request = client.request
            self.decode_runner.receive(
                self.prefill_runner,
                self.prefill.block_table(request.request_id, request.attempt),
                self.decode.block_table(request.request_id, request.attempt),
                range(client.grant.num_cached_tokens, len(request.token_ids)),
            )
            self.decode.start(request.request_id, request.attempt, {0: client.output[-1]})
            self.prefill.release(request.request_id, request.attempt)
            client.grant, client.is_computed, client.wants_place = None, False, False
        return has_moved

    def _step_decode(self) -> bool:
        plan = self.decode.plan_step()
        for let_go in self.decode.take_let_go():
            client = self.clients[let_go.request.request_id]
            if let_go.stage is Stage.RESERVED:
                client.grant = None
                continue
            assert let_go.next_index == len(client.output)
            client.request = continue_request(client.request, tuple(client.output))
            client.is_submitted = False
            client.num_preemptions += 1
        if plan is None:
            return False
        for progress in self.decode.complete_step(plan, self.decode_runner.run(plan)):
            client = self.clients[progress.request_id]
            assert progress.output_index == len(client.output)
            client.output.append(progress.token.token_id)
            client.is_done = progress.finish_reason is not None
        return True
