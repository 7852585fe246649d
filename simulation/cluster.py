"""A cluster in virtual time: one router, both pools, the links between them.

The router here decides nothing by itself: admission and policy are the modules of production, and
what it does in between is what `router.recovery` does, without a network.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from autoscaler.figures import Traffic
from decode_worker.occupancy import LetGo
from decode_worker.progress import DecodeProgress
from kv_transfer.prefill_actions import PrefillStage
from pdserve.engine.scheduler import Stage
from pdserve.errors import NoWorker, Overloaded, PdserveError, TooLong
from pdserve.request import Request, RequestId, Role, WorkerId
from prefill_worker.scheduler import PrefillProgress
from router.admission import Admission
from router.policy import Choice
from router.slo import TooLate
from router.traffic import TrafficMeter
from router.worker_key import WorkerKey
from simulation.clock import EventQueue, without_collector
from simulation.decode_node import DecodeNode
from simulation.handoffs import Handoff, Handoffs
from simulation.journey import Journey, begin_journey
from simulation.nodes import Nodes
from simulation.piece_chain import PieceChain, PromptChains
from simulation.prefill_node import PrefillNode
from simulation.readings import sum_traffic
from simulation.record import Outcome
from simulation.routing import Brain, PolicyMaker, make_joint_policy
from simulation.scaler import Scaler
from simulation.shape import ClusterRun, ClusterShape
from simulation.turns import Turns, Waiting
from simulation.workload import Arrival, Workload

RETRY_S = 0.05
MAX_ATTEMPTS = 5


class Cluster:
    """All parts, and the router's share of every request."""

    def __init__(
        self,
        shape: ClusterShape,
        make_policy: PolicyMaker = make_joint_policy,
        chains: PromptChains | None = None,
    ) -> None:
        """Starts the workers; nothing arrives yet. Several clusters may share chains."""
        self.shape = shape
        self._chains = chains
        self.queue = EventQueue()
        self.brain = Brain(
            {one.worker_class: one for one in (shape.prefill, shape.decode)}.values(),
            self.queue,
            make_policy=make_policy,
            max_local_tokens=shape.max_local_tokens,
            cache_events_s=shape.cache_events_s,
        )
        self.brain.caches.has_work = lambda: bool(self._journeys)
        self._admission = Admission(shape.max_queued, shape.max_in_flight)
        self._handoffs = Handoffs(shape.prefill, shape.control_s, self.queue, self)
        self._journeys: dict[RequestId, Journey] = {}
        self.nodes = Nodes(
            shape,
            self.queue,
            self.brain,
            self,
            make_chain=self._chain_of,
            make_token=self._token_of,
        )
        self._turns = Turns(
            self.brain, self.queue, lambda request_id: self._place(self._journeys[request_id])
        )
        self.run_so_far = ClusterRun()
        self._meter = TrafficMeter()
        self._num_coming = 0
        self._until_s = inf
        self.scaler: Scaler | None = None
        if shape.scaling is None:
            self.nodes.begin()
        else:
            self.scaler = Scaler(shape, self.queue, self, self._has_more)

    def add_worker(self, role: Role, worker_id: WorkerId) -> WorkerKey:
        """Starts a worker, which takes requests at once."""
        return self.nodes.add(role, worker_id)

    def slow_down(self, worker: WorkerKey, factor: float) -> None:
        """Makes a worker's steps take so many times as long, from its next one on."""
        node = self.nodes.find(worker)
        assert node is not None
        node.change_pace(factor)

    def kill(self, worker: WorkerKey) -> None:
        """Ends a worker's process; the router finds out a while later."""
        lost = self._end(worker)
        self.queue.after(self.shape.detect_s, lambda: self._lost_worker(worker, lost))
        if self.scaler is not None:
            self.scaler.replicas.died(worker)

    def retire(self, worker: WorkerKey) -> None:
        """Ends a worker that has drained, or had its time to; the router knows at once."""
        self._lost_worker(worker, self._end(worker))

    def _end(self, worker: WorkerKey) -> tuple[LetGo, ...]:
        role, busy_s, lost = self.nodes.end(worker)
        self.run_so_far.busy_s[role].append(busy_s)
        return lost

    def traffic(self) -> Traffic:
        """Returns what the router has seen, as a front of production tells it."""
        seen = self.nodes, self._meter, self.run_so_far.num_output_tokens, self._admission
        return sum_traffic(self.queue.now(), self._journeys.values(), *seen)

    def run(self, workload: Workload, until_s: float = inf) -> ClusterRun:
        """Lets all requests come, until an end if there is one, and returns what became of them."""
        self._num_coming, self._until_s = len(workload.arrivals), until_s
        if self.scaler is not None:
            self.scaler.begin()
        for number, arrival in enumerate(workload.arrivals):
            self.queue.at(arrival.at_s, partial(self._arrive, number, arrival))
        with without_collector():
            self.queue.run(until_s)
        for journey in tuple(self._journeys.values()):
            self._finish(journey, Outcome.UNFINISHED)
        result = self.run_so_far
        result.busy_s[Role.PREFILL] += [one.busy_s for one in self.nodes.prefills.values()]
        result.busy_s[Role.DECODE] += [one.busy_s for one in self.nodes.decodes.values()]
        result.end_s, result.num_events = self.queue.now(), self.queue.num_done
        if self.scaler is not None:
            result.decisions = self.scaler.decisions
            result.spans = self.scaler.replicas.spans
        return result

    def _has_more(self) -> bool:
        return bool(self._num_coming or self._journeys) or self._until_s < inf

    # What requests go through, in the order of their lives.

    def _arrive(self, number: int, arrival: Arrival) -> None:
        journey = begin_journey(number, arrival, self.shape.prefill.block_size, self._chains)
        request = journey.request
        self._num_coming -= 1
        try:
            self._admission.admit()
        except Overloaded:
            self._finish(journey, Outcome.REFUSED)
            return
        journey.is_admitted = True
        self._meter.note_arrival(arrival.num_prompt_tokens)
        self._journeys[request.request_id] = journey
        self.brain.caches.wake()
        self.queue.after(self.shape.router_s, lambda: self._wait_for_turn(journey))

    def _wait_for_turn(self, journey: Journey) -> None:
        query, shape = journey.query(self.shape, self.queue.now()), self.shape
        role = Role.PREFILL if query.has_prefill_pool else Role.DECODE
        num_before = self._turns.tokens_before(journey.arrival.priority)
        wait_s = self.brain.drain_s(num_before, role) if num_before else None
        if query.ttft_slo_s is not None and wait_s is not None and wait_s > query.ttft_slo_s:
            self._finish(journey, Outcome.REFUSED)
        elif shape.has_waiting_room:
            turn = Waiting(
                request_id=journey.request_id,
                priority=journey.arrival.priority,
                tenant=journey.arrival.tenant,
                uncached_tokens=self.brain.expect_uncached(query),
            )
            self._turns.wait(turn, role)
        else:
            self._place(journey)

    def _place(self, journey: Journey) -> None:
        if journey.request_id not in self._journeys:
            return
        try:
            choice = self.brain.place(journey.query(self.shape, self.queue.now()))
        except TooLate:
            self._finish(journey, Outcome.REFUSED)
            return
        except NoWorker:
            self.queue.after(RETRY_S, lambda: self._place(journey))
            return
        except TooLong:
            self._finish(journey, Outcome.TOO_LONG)
            return
        journey.prefill, journey.decode, journey.is_placed = choice.prefill, choice.decode, True
        if journey.is_waiting:
            journey.is_waiting = False
            self._admission.start()
        request = journey.request
        self.queue.after(self.shape.control_s, lambda: self._submit(journey, request, choice))

    def _submit(self, journey: Journey, request: Request, choice: Choice) -> None:
        if journey.request is not request:
            return
        try:
            node = self.nodes.first_of(choice)
            if node is None:
                return
            if node.is_draining:
                # It says so before it has begun with it: the next try is no new attempt.
                self.brain.keep_only(journey.request_id, ())
                self._place(journey)
            elif isinstance(node, DecodeNode):
                node.submit_local(request)
            else:
                self._handoffs.begin(request, node, self.nodes.decodes.get(choice.decode))
                node.submit(request)
        except TooLong:
            self._finish(journey, Outcome.TOO_LONG)
        except PdserveError:
            self._try_again(journey, request.num_emitted)

    # What workers say: `PrefillOutlet`, `DecodeOutlet` and `HandoffOutlet`.

    def wants_reservations(self, node: PrefillNode, requests: Sequence[Request]) -> None:
        """Passes on."""
        self._handoffs.wants_reservations(requests)

    def has_computed(self, node: PrefillNode, progress: PrefillProgress) -> None:
        """Passes on; the first token is the client's."""
        journey = self._journeys[progress.request_id]
        if progress.samples:
            self.brain.finish_prefill(progress.request_id, node.key)
            self._note_first(journey, node.scheduler.num_cached_tokens(progress.request_id))
            if progress.samples[0].finish_reason is not None:
                handoff = self._handoffs.find(progress.request_id)
                assert handoff is not None
                self._handoffs.end(handoff, PrefillStage.FINISHED)
                node.release(progress.request_id, progress.attempt)
                self._finish(journey, Outcome.DONE)
                return
        self._handoffs.has_computed(progress)

    def needs_decode(self, handoff: Handoff, retry_after_s: float | None) -> None:
        """Names another decode worker, or waits until one may have room."""
        journey = self._journeys[handoff.request.request_id]
        if retry_after_s is not None and journey.decode is not None:
            journey.tried.add(journey.decode)
        self._place_decode(journey, handoff, retry_after_s or RETRY_S)

    def cannot_fit(self, handoff: Handoff) -> None:
        """Fails a request that decode can never hold."""
        journey = self._journeys[handoff.request.request_id]
        self._handoffs.end(handoff, PrefillStage.CANCELLED)
        handoff.prefill.cancel(journey.request_id)
        self._finish(journey, Outcome.TOO_LONG)

    def is_handed_off(self, handoff: Handoff) -> None:
        """Prefill has no part in it any more."""
        journey = self._journeys[handoff.request.request_id]
        journey.prefill = None
        self._keep_holders(journey)

    def has_started(self, node: DecodeNode, request: Request, step_end_s: float) -> None:
        """Notes when the token behind the hand-off comes."""
        journey = self._journeys[request.request_id]
        if journey.second_s is None:
            journey.second_s = step_end_s

    def has_stepped(self, num_tokens: int, step_s: float) -> None:
        """Counts gaps between tokens."""
        self.run_so_far.gaps.add(step_s, num_tokens)

    def has_sampled(self, node: DecodeNode, progress: DecodeProgress) -> None:
        """Takes a token of a planned step."""
        journey = self._journeys[progress.request_id]
        self.brain.finish_prefill(progress.request_id, node.key)
        if journey.first_s is None:
            self._note_first(journey, progress.num_cached_tokens)
        if progress.finish_reason is not None:
            self._note_last(journey)

    def has_ended(self, node: DecodeNode, request: Request) -> None:
        """Takes the last token of a run."""
        self._note_last(self._journeys[request.request_id])

    def has_let_go(self, node: DecodeNode, let_go: LetGo) -> None:
        """Finds another place for what a decode worker gave up."""
        self.queue.after(self.shape.control_s, lambda: self._let_go(let_go))

    def _let_go(self, let_go: LetGo) -> None:
        request_id = let_go.request.request_id
        journey = self._journeys.get(request_id)
        if journey is None or journey.request.attempt != let_go.request.attempt:
            return
        handoff = self._handoffs.find(request_id)
        if let_go.stage is Stage.RESERVED and handoff is not None:
            self._handoffs.lose_decode(handoff)
        else:
            self._try_again(journey, let_go.next_index)

    def _lost_worker(self, worker: WorkerKey, lost: tuple[LetGo, ...]) -> None:
        self.brain.leave(worker)
        for let_go in lost:
            self._let_go(let_go)
        for journey in tuple(self._journeys.values()):
            handoff = self._handoffs.find(journey.request_id)
            if journey.prefill == worker:
                if handoff is not None:
                    self._handoffs.end(handoff, PrefillStage.RETURNED)
                self._try_again(journey, journey.request.num_emitted)
            elif journey.decode == worker:
                if handoff is None:
                    self._try_again(journey, journey.request.num_emitted)
                else:
                    self._handoffs.lose_decode(handoff)

    def _place_decode(self, journey: Journey, handoff: Handoff, retry_s: float) -> None:
        if handoff.stage is not PrefillStage.UNPLACED or handoff.prefill.is_dead:
            return
        if self._handoffs.find(journey.request_id) is not handoff:
            return
        if handoff.has_token and self.queue.now() - handoff.unplaced_s > self.shape.hold_s:
            self._handoffs.end(handoff, PrefillStage.RETURNED)
            handoff.prefill.cancel(journey.request_id)
            self._try_again(journey, journey.request.num_emitted)
            return
        query = replace(
            journey.query(self.shape, self.queue.now()), excluded=frozenset(journey.tried)
        )
        try:
            journey.decode = self.brain.place_decode(query, handoff.prefill.key)
        except NoWorker:
            journey.tried.clear()
            self.queue.after(retry_s, lambda: self._place_decode(journey, handoff, retry_s))
            return
        except TooLong:
            self.cannot_fit(handoff)
            return
        self._keep_holders(journey)
        decode = self.nodes.decodes.get(journey.decode)
        if decode is not None:
            self._handoffs.place(handoff, decode)

    def _try_again(self, journey: Journey, num_emitted: int) -> None:
        """Begins the next attempt, with the tokens that the client has."""
        old = journey.request
        if old.attempt >= MAX_ATTEMPTS:
            self._finish(journey, Outcome.FAILED)
            return
        tokens = old.token_ids[: old.num_prompt_tokens] + (journey.token,) * num_emitted
        journey.request = replace(old, token_ids=tokens, attempt=old.attempt + 1, is_priority=True)
        journey.prefill = journey.decode = None
        journey.tried.clear()
        self.brain.keep_only(journey.request_id, ())
        if not journey.is_waiting:
            journey.is_waiting = True
            self._admission.wait_again()
        self._place(journey)

    def _keep_holders(self, journey: Journey) -> None:
        holders = tuple(key for key in (journey.prefill, journey.decode) if key is not None)
        self.brain.keep_only(journey.request_id, holders)

    def _note_first(self, journey: Journey, cached_tokens: int) -> None:
        if journey.first_s is None:
            journey.first_s = self.queue.now() + self.shape.control_s
            self.run_so_far.num_first_tokens += 1
            journey.cached_tokens = cached_tokens

    def _note_last(self, journey: Journey) -> None:
        journey.last_s = self.queue.now() + self.shape.control_s
        self.brain.note_output(journey.arrival.num_output_tokens)
        self._finish(journey, Outcome.DONE)

    def _finish(self, journey: Journey, outcome: Outcome) -> None:
        journey.outcome = outcome
        if journey.last_s is None and outcome is Outcome.DONE:
            journey.last_s = journey.first_s
        if outcome is Outcome.DONE:
            self._meter.note_end(journey.arrival.num_prompt_tokens, journey.cached_tokens)
        self._journeys.pop(journey.request_id, None)
        if journey.is_admitted:
            self.brain.keep_only(journey.request_id, ())
            service_s = self.queue.now() - journey.arrival.at_s
            self._admission.leave(is_waiting=journey.is_waiting, service_s=service_s)
        self.run_so_far.records.append(journey.record())

    def _token_of(self, request: Request) -> int:
        return self._journeys[request.request_id].token

    def _chain_of(self, request: Request, block_size: int, revision: str) -> PieceChain:
        journey = self._journeys[request.request_id]
        chain = journey.chain
        if chain is None or chain.block_size != block_size:
            chain = PieceChain(journey.arrival.pieces, block_size)
        else:
            chain = chain.fork()
        chain.append_copies(journey.token, request.num_emitted)
        return chain
