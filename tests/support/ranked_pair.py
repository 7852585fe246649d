"""Both pools' engines with several ranks each: rank 0 on the test's thread, others on their own.

The real engines, followers' desks and protocol; rank 0's orders reach the other ranks through
queues instead of sockets, and frames travel over links in memory.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from decode_worker.engine import DecodeEngine
from decode_worker.rank import build_engine as build_decode
from kv_transfer.follower_codec import event_to_wire
from kv_transfer.follower_desk import FollowerDesk
from kv_transfer.memory_links import MemoryHub, MemoryReceiver, MemorySender
from kv_transfer.shipping import RankShipper, RankUnloader
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.link_memory import max_frame_bytes
from pdserve.engine.batch import StepPlan
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.step_codec import PlanDecoder, PlanEncoder
from pdserve.models.folder import geometry_of
from pdserve.models.registry import load_model
from pdserve.rank.startup import RankContext
from pdserve.request import Role, WorkerId
from pdserve.rpc.v1 import rank_pb2
from prefill_worker.engine import PrefillEngine
from prefill_worker.rank import build_engine as build_prefill
from tests.support.engine_pair import EnginePair
from tests.support.memory_links import DECODE, PREFILL
from tests.support.thread_ranks import TIMEOUT_S, make_shards

Post = Callable[[object], None]


@dataclass(frozen=True)
class Shape:
    """Ranks of a replica."""

    tensor: int = 1
    stages: int = 1


class FollowerThread:
    """A rank that is not the first: obeys orders one after another, and remembers its steps."""

    def __init__(
        self,
        rank: int,
        runner: ModelRunner,
        tell: Post,
        *,
        shipper: RankShipper | None,
        unloader: RankUnloader | None,
    ) -> None:
        self.steps: list[StepPlan] = []
        self._runner = runner
        self._decoder = PlanDecoder()
        self.desk = FollowerDesk(
            rank=rank, compute=self._compute, tell=tell, shipper=shipper, unloader=unloader
        )
        self._orders: queue.Queue[rank_pb2.ToFollower | None] = queue.Queue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _compute(self, work: rank_pb2.StepWork) -> None:
        plan = self._decoder.decode(work)
        self.steps.append(plan)
        self._runner.compute(plan)

    def order(self, message: rank_pb2.ToFollower) -> None:
        self._orders.put(message)

    def wait_idle(self) -> None:
        """Waits until all orders are obeyed; what went wrong there is raised here."""
        self._orders.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (message := self._orders.get()) is not None:
            try:
                # What follows a failure would only hide it; `wait_idle` raises it.
                if self._failure is None:
                    self.desk.handle(message)
            except Exception as error:  # noqa: BLE001
                self._failure = error
            finally:
                self._orders.task_done()


class ThreadFollowers:
    """Stands in for `Followers`: steps run beside rank 0's, other orders are waited for.

    So links in memory, which know no threads, are used by one thread at a time.
    """

    def __init__(self, ranks: list[FollowerThread], announced: list[StepPlan]) -> None:
        self.ranks = ranks
        self.announced = announced
        self._encoder = PlanEncoder()

    def announce(self, plan: StepPlan) -> None:
        self.announced.append(plan)
        message = rank_pb2.ToFollower(step=self._encoder.encode(plan))
        for rank in self.ranks:
            rank.order(message)

    def send(self, rank: int, message: rank_pb2.ToFollower) -> None:
        follower = self.ranks[rank - 1]
        follower.order(message)
        follower.wait_idle()


class RankedSide:
    """The ranks of one worker: their parts of the model, their memory and links."""

    def __init__(self, context: RankContext, shape: Shape, post: Post) -> None:
        """`context` is that of an only rank; `post` takes what ranks and links tell rank 0."""
        config = context.config
        engine = replace(
            config.engine, tensor_parallel=shape.tensor, pipeline_parallel=shape.stages
        )
        folder = Path(engine.model)
        self._context = replace(
            context,
            config=replace(config, engine=engine),
            geometry=geometry_of(context.model, engine),
        )
        self._post = post
        self._models = [load_model(folder, engine, s) for s in make_shards(folder, engine)]
        geometry, num_blocks = self._context.geometry, context.kv.num_blocks
        self.kv = [KvTensors(geometry, num_blocks, part) for part in geometry.parts]
        self.followers: list[FollowerThread] = []
        self.announced: list[StepPlan] = []
        """The steps that rank 0 told the others of."""

    def make_senders(self, hub: MemoryHub) -> list[MemorySender]:
        config = self._context.config
        return [
            MemorySender(
                hub=hub,
                worker_id=WorkerId(config.worker_id),
                incarnation=self._context.incarnation,
                ring_slots=config.handoff.ring_slots,
                post=self._post_of(rank),
                rank=rank,
            )
            for rank in range(len(self.kv))
        ]

    def make_receivers(self, hub: MemoryHub) -> list[MemoryReceiver]:
        handoff, geometry = self._context.config.handoff, self._context.geometry
        return [
            MemoryReceiver(
                hub=hub,
                incarnation=self._context.incarnation,
                ring_slots=handoff.ring_slots,
                slot_bytes=max_frame_bytes(
                    geometry, rank, handoff.frame_tokens, "auto", handoff.frame_layers
                ),
                post=self._post_of(rank),
                rank=rank,
            )
            for rank in range(len(self.kv))
        ]

    def lead(
        self, shippers: Sequence[RankShipper] = (), unloaders: Sequence[RankUnloader] = ()
    ) -> RankContext:
        """Starts the other ranks and returns the context of rank 0."""
        for rank in range(1, len(self.kv)):
            runner = ModelRunner(self._models[rank], self.kv[rank])
            follower = FollowerThread(
                rank,
                runner,
                self._post,
                shipper=shippers[rank] if shippers else None,
                unloader=unloaders[rank] if unloaders else None,
            )
            self.followers.append(follower)
        leads = ThreadFollowers(self.followers, self.announced) if self.followers else None
        announce = None if leads is None else leads.announce
        links = (one.desk.link for one in self.followers)
        return replace(
            self._context,
            kv=self.kv[0],
            runner=ModelRunner(self._models[0], self.kv[0], announce),
            followers=leads,  # type: ignore[arg-type]
            follower_links=tuple(link for link in links if link is not None),
        )

    def wait_idle(self) -> None:
        for follower in self.followers:
            follower.wait_idle()

    def _post_of(self, rank: int) -> Post:
        if rank == 0:
            return self._post
        # As the desk of that rank would tell it.
        return lambda event: self._post(event_to_wire(event))


class RankedPair(EnginePair):
    """A prefill and a decode worker of any shape over the same model folder."""

    def __init__(self, folder: Path, *, prefill: Shape, decode: Shape, **settings: object) -> None:
        self._shapes = (prefill, decode)
        self._hub = MemoryHub()
        self._events: deque[tuple[Role, object]] = deque()
        super().__init__(folder, **settings)  # type: ignore[arg-type]

    def _build_prefill(self, num_blocks: int) -> PrefillEngine:
        context = self._context(Role.PREFILL, PREFILL, num_blocks, self.prefill_outbox)
        side = RankedSide(context, self._shapes[0], self._post_of(Role.PREFILL))
        senders = side.make_senders(self._hub)
        shippers = [RankShipper(*pair) for pair in zip(side.kv, senders, strict=True)]
        self.prefill_side = side
        return build_prefill(side.lead(shippers=shippers), links=senders[0])

    def _build_decode(self, num_blocks: int) -> DecodeEngine:
        context = self._context(Role.DECODE, DECODE, num_blocks, self.decode_outbox)
        side = RankedSide(context, self._shapes[1], self._post_of(Role.DECODE))
        receivers = side.make_receivers(self._hub)
        unloaders = [RankUnloader(*pair) for pair in zip(side.kv, receivers, strict=True)]
        self.decode_side = side
        return build_decode(side.lead(unloaders=unloaders), links=receivers[0])

    def exchange(self) -> None:
        """Also delivers what links and other ranks tell."""
        while True:
            super().exchange()
            self.prefill_side.wait_idle()
            self.decode_side.wait_idle()
            if not self._events:
                return
            role, event = self._events.popleft()
            engine = self.prefill if role is Role.PREFILL else self.decode
            engine.handle(event)

    def close(self) -> None:
        """Ends the threads."""
        for side in (self.prefill_side, self.decode_side):
            for follower in side.followers:
                follower.close()

    def _post_of(self, role: Role) -> Post:
        return lambda event: self._events.append((role, event))


@contextmanager
def ranked_pair(
    folder: Path, prefill: tuple[int, int], decode: tuple[int, int], **settings: object
) -> Iterator[RankedPair]:
    """Makes a pair of (tensor, stages) each, and checks in the end that nothing is held."""
    pair = RankedPair(folder, prefill=Shape(*prefill), decode=Shape(*decode), **settings)
    try:
        yield pair
        pair.assert_ledger()
    finally:
        pair.close()
