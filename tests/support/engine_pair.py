"""Both pools' engines in one thread: real schedulers, protocol, model and KV; no sockets.

Calls between workers and frames between ranks go through queues that a test can hold, drop or
corrupt. Time is a manual clock.
"""

from collections.abc import Callable
from pathlib import Path

from decode_worker.engine import DecodeEngine
from decode_worker.rank import build_engine as build_decode
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.config.worker import HandoffConfig, WorkerConfig
from pdserve.engine.batch import StepRunner
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.models.registry import load_model
from pdserve.rank.startup import RankContext
from pdserve.request import Incarnation, Request, Role
from pdserve.rpc.codec import request_to_wire
from pdserve.rpc.v1 import rank_pb2, worker_pb2
from pdserve.timeline import ManualClock
from prefill_worker.engine import PrefillEngine
from prefill_worker.rank import build_engine as build_prefill
from tests.support.host_device import HostDevice, Network
from tests.support.late_runner import LateRunner
from tests.support.marked_runner import MarkedRunner
from tests.support.memory_links import DECODE, PREFILL, MemoryLinks
from tests.support.pair_router import PairRouter
from tests.support.recording_outbox import RecordingOutbox

TURN_S = 0.01


RankMaker = Callable[[Path, EngineConfig, int], tuple[KvTensors, StepRunner]]
"""Makes KV memory of so many blocks and what computes over it."""


class EnginePair:
    """One prefill and one decode engine over the same model folder."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill_blocks: int = 256,
        decode_blocks: int = 256,
        handoff: HandoffConfig | None = None,
        max_local_prefill_tokens: int | None = None,
        is_overlapped: bool = False,
        make_rank: RankMaker | None = None,
        reads_blocks: bool = False,
        is_marked: bool = False,
        **engine: object,
    ) -> None:
        """Makes both.

        Args:
            folder: of the model.
            prefill_blocks: KV blocks of the prefill engine.
            decode_blocks: of the decode engine.
            handoff: settings of both.
            max_local_prefill_tokens: of the decode engine.
            is_overlapped: two steps are in flight.
            make_rank: makes memory and runner of both, prefill first.
            reads_blocks: links read frames out of blocks, as on a GPU.
            is_marked: and before their step has ended.
            engine: further settings.
        """
        self.clock = ManualClock()
        self.prefill_log: list[str] = []
        """Calls, flushes and frames of the prefill side, in their order."""
        self.links = MemoryLinks(log=self.prefill_log)
        self.config = EngineConfig(model=str(folder), **engine)
        self._model_config = read_model_config(folder)
        self._folder = folder
        self._make_rank = make_rank
        self._model = None if make_rank is not None else load_model(folder, self.config)
        self._handoff = handoff or HandoffConfig(frame_tokens=64)
        self._max_local = max_local_prefill_tokens
        self._is_overlapped = is_overlapped
        self._reads_blocks = reads_blocks or is_marked
        self._is_marked = is_marked
        self.marked: MarkedRunner | None = None
        self.late_runners: list[LateRunner] = []
        self.prefill_outbox = RecordingOutbox(self.prefill_log)
        self.decode_outbox = RecordingOutbox()
        self.prefill: PrefillEngine = self._build_prefill(prefill_blocks)
        self.decode: DecodeEngine = self._build_decode(decode_blocks)
        self.may_deliver = True
        self.may_commit = True
        self._decode_calls: dict[int, int] = {}
        self._next_call_id = 1000
        self._attempts: dict[str, int] = {}

    def _build_prefill(self, num_blocks: int) -> PrefillEngine:
        context = self._context(Role.PREFILL, PREFILL, num_blocks, self.prefill_outbox)
        if not self._reads_blocks:
            return build_prefill(context, links=self.links)
        self.links.source = context.kv
        return build_prefill(context, self.links, HostDevice(context.kv, Network(), uuid="p"))

    def _build_decode(self, num_blocks: int) -> DecodeEngine:
        context = self._context(Role.DECODE, DECODE, num_blocks, self.decode_outbox)
        if not self._reads_blocks:
            return build_decode(context, links=self.links)
        return build_decode(context, self.links, HostDevice(context.kv, Network(), uuid="d"))

    def _context(
        self, role: Role, incarnation: Incarnation, num_blocks: int, outbox: RecordingOutbox
    ) -> RankContext:
        geometry = geometry_of(self._model_config, self.config)
        if self._make_rank is not None:
            kv, runner = self._make_rank(self._folder, self.config, num_blocks)
        else:
            kv = KvTensors(geometry, num_blocks)
            runner = self._make_runner(kv, role)
        config = WorkerConfig(
            role=role,
            worker_id=f"{role.value}-0",
            engine=self.config,
            redis_url="",
            handoff=self._handoff,
            max_local_prefill_tokens=self._max_local,
        )
        return RankContext(
            config=config,
            incarnation=incarnation,
            clock=self.clock,
            inbox=None,
            outbox=outbox,
            model=self._model_config,
            geometry=geometry,
            kv=kv,
            runner=runner,
            marks=self.marked,
            max_model_len=min(self._model_config.max_position, num_blocks * geometry.block_size),
        )

    def _make_runner(self, kv: KvTensors, role: Role) -> StepRunner:
        assert self._model is not None
        runner = ModelRunner(self._model, kv)
        if self._is_marked and role is Role.PREFILL:
            self.marked = MarkedRunner(runner)
            self.marked.on_computed = self.exchange
            return self.marked
        if not self._is_overlapped:
            return runner
        self.late_runners.append(LateRunner(runner))
        return self.late_runners[-1]

    def submit(self, request: Request, *, is_local: bool = False) -> None:
        """Sends a request to prefill (or, local, to decode)."""
        message = worker_pb2.SubmitRequest(request=request_to_wire(request))
        if is_local:
            message.local_prefill.SetInParent()
        else:
            message.decode.CopyFrom(self.target(request))
        engine = self.decode if is_local else self.prefill
        engine.handle(rank_pb2.ToRank(call_id=1, submit=message))

    def target(self, request: Request) -> worker_pb2.DecodeTarget:
        attempt = self._attempts[request.request_id] = self._attempts.get(request.request_id, 0) + 1
        return worker_pb2.DecodeTarget(
            worker_id="decode-0", incarnation=DECODE, address="decode", decode_attempt=attempt
        )

    def place(self, request: Request) -> None:
        """Answers a NeedsPlacement with the same decode worker."""
        message = worker_pb2.PlaceDecodeRequest(
            request_id=request.request_id, attempt=request.attempt, decode=self.target(request)
        )
        self.prefill.handle(rank_pb2.ToRank(call_id=2, place_decode=message))

    def cancel(self, engine: PrefillEngine | DecodeEngine, request: Request) -> None:
        message = worker_pb2.CancelRequest(request_id=request.request_id, attempt=request.attempt)
        engine.handle(rank_pb2.ToRank(call_id=3, cancel=message))

    def turn(self) -> None:
        """Lets each side act once, and moves calls and frames between them."""
        self.clock.advance(TURN_S)
        self.exchange()
        for engine in (self.prefill, self.decode):
            engine.tick()
            if not engine.step() and engine.awaited is not None:
                # As a rank's loop does; a device of its own computes meanwhile.
                engine.awaited.wait()
                engine.step()
            self.exchange()

    def exchange(self) -> None:
        """Delivers calls, answers and frames until nothing moves."""
        while True:
            moved = self._carry_calls() or self._carry_answers()
            if self.may_deliver and self.links.has_next:
                sent, landed = self.links.deliver()
                self.prefill.handle(sent)
                self.decode.handle(landed)
                moved = True
            if not moved:
                return

    def _carry_calls(self) -> bool:
        if not self.prefill_outbox.sent:
            return False
        message = self.prefill_outbox.sent[0]
        if message.peer_call.HasField("commit") and not self.may_commit:
            return False
        self.prefill_outbox.sent.popleft()
        if not message.HasField("peer_call"):
            return True
        call = message.peer_call
        self._next_call_id += 1
        self._decode_calls[self._next_call_id] = message.call_id
        forward = rank_pb2.ToRank(call_id=self._next_call_id)
        match call.WhichOneof("call"):
            case "reserve":
                forward.reserve.CopyFrom(call.reserve)
            case "commit":
                forward.commit.CopyFrom(call.commit)
            case "abort":
                forward.abort.CopyFrom(call.abort)
            case "renew":
                forward.renew.CopyFrom(call.renew)
        self.decode.handle(forward)
        return True

    def _carry_answers(self) -> bool:
        if not self.decode_outbox.sent:
            return False
        message = self.decode_outbox.sent.popleft()
        call_id = self._decode_calls.pop(message.call_id, None)
        if call_id is None:
            return True
        answer = rank_pb2.PeerReply()
        match message.reply.WhichOneof("reply"):
            case "reserve":
                answer.reserve.CopyFrom(message.reply.reserve)
            case "commit":
                answer.commit.CopyFrom(message.reply.commit)
            case "abort":
                answer.abort.CopyFrom(message.reply.abort)
            case "renew":
                answer.renew.CopyFrom(message.reply.renew)
        self.prefill.handle(rank_pb2.ToRank(call_id=call_id, peer_reply=answer))
        return True

    def run(self, requests: list[Request], *, max_turns: int = 4000) -> dict[str, list[int]]:
        """Plays the router until every request has finished; returns output ids by request."""
        router = PairRouter(self)
        for request in requests:
            router.start(request)
        for _ in range(max_turns):
            self.turn()
            router.read()
            if not router.open:
                self.settle()
                return router.outputs
        raise AssertionError(f"still open after {max_turns} turns: {sorted(router.open)}")

    def settle(self) -> None:
        """Lets what is under way end."""
        for _ in range(5):
            self.turn()

    def assert_ledger(self) -> None:
        """LEDGER: free + cached = total, and nothing else is held."""
        for engine in (self.prefill, self.decode):
            ledger = engine.describe().ledger
            assert ledger.free_blocks + ledger.cached_blocks == ledger.total_blocks, ledger
            held = ledger.sequences + ledger.reservations + ledger.leases
            assert held + ledger.transfers + ledger.held_handoffs == 0, ledger
