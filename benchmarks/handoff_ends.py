"""The two ends of the hand-off benchmark, a process each: `prefill` and `decode`.

Orders come as JSON lines on stdin, answers go to stdout as JSON lines. An end has what a rank has:
KV memory, the links of its pool, an inbox. Times are of the monotonic clock, which both share.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_engine import Bench
from benchmarks.handoff_order import NUM_BLOCKS, Order, reservation_of, table_of
from benchmarks.processes import memory_bytes
from benchmarks.prompt_stream import EVENT_TIMEOUT_S, PromptStream
from benchmarks.shapes import LLAMA_3_8B
from decode_worker.rank import make_links as make_receiver
from kv_transfer.device_choice import find_link_device
from kv_transfer.events import FrameLanded, FramePlaced, FrameSent, LinkDown, LinkEnds
from kv_transfer.expected_frames import ExpectedFrame, ExpectedFrames
from kv_transfer.lanes import make_pair
from kv_transfer.plan import Frame, make_manifest
from kv_transfer.protocol import LinkEndpoint
from kv_transfer.shipping import RankShipper, RankUnloader, ShipFrame, UnloadFrame, region_of
from kv_transfer.transport import LinkPeer
from pdserve.cache.kv_marks import KvMarks
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.config.link_memory import DEVICE_FRAME_LAYERS, settle_frames
from pdserve.config.worker import HandoffConfig, WorkerConfig
from pdserve.engine.batch import PendingStep, StepPlan
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.rank.inbox import Inbox
from pdserve.rank.outbox import Outbox
from pdserve.rank.startup import SWITCH_INTERVAL_S, RankContext
from pdserve.request import BlockId, Incarnation, ReservationId, Role, WorkerId
from pdserve.rpc.channel import BlockingChannel
from pdserve.rpc.channel import make_pair as make_sockets
from pdserve.timeline import MonotonicClock
from prefill_worker.rank import make_links as make_sender

INCARNATIONS = {Role.PREFILL: Incarnation(1), Role.DECODE: Incarnation(2)}


class NoRunner:
    """Computes nothing: these ends are given KV."""

    max_steps_in_flight = 1

    def launch(self, plan: StepPlan) -> PendingStep:
        raise AssertionError("nothing is computed here")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How both ends are made."""

    handoff: HandoffConfig
    is_trial: bool
    """On a CPU, with KV of one layer: shows that it works."""
    leaves_early: bool = True
    """Frames leave while their step is computed; else when it has ended."""

    @property
    def device(self) -> torch.device:
        """Where KV lies."""
        return torch.device("cpu") if self.is_trial else torch.device("cuda", 0)

    def count_memory(self) -> list[int]:
        """Returns this process's bytes on the host, and all that are in use on its GPU."""
        on_host = memory_bytes(os.getpid())["Rss"]
        if self.is_trial:
            return [on_host, 0]
        free, total = torch.cuda.mem_get_info()
        return [on_host, total - free]


def synchronize(setting: Setting) -> None:
    """Waits for all work of the GPU."""
    if not setting.is_trial:
        torch.cuda.synchronize()


def make_context(role: Role, setting: Setting, kv: KvTensors | None) -> RankContext:
    """Makes what links are made from; KV of random values if there is none yet."""
    with tempfile.TemporaryDirectory() as scratch:
        shape = LLAMA_3_8B | ({"num_hidden_layers": 1} if setting.is_trial else {})
        (Path(scratch) / "config.json").write_text(json.dumps(shape))
        engine = EngineConfig(
            model=scratch, device="cpu" if setting.is_trial else "cuda", dtype="bfloat16"
        )
        model = read_model_config(Path(scratch))
        geometry = geometry_of(model, engine)
    if kv is None:
        kv = KvTensors(geometry, NUM_BLOCKS, None, setting.device)
        if role is Role.PREFILL:
            fill(kv)
            synchronize(setting)
    ours, _ = make_sockets()
    config = WorkerConfig(
        role=role, worker_id=f"{role}-0", engine=engine, redis_url="", handoff=setting.handoff
    )
    return RankContext(
        config=config,
        incarnation=INCARNATIONS[role],
        clock=MonotonicClock(),
        inbox=Inbox(),
        outbox=Outbox(BlockingChannel(ours)),
        model=model,
        geometry=geometry,
        kv=kv,
        runner=NoRunner(),
        max_model_len=model.max_position,
    )


def fill(kv: KvTensors) -> None:
    """Writes random values everywhere."""
    for layer in range(len(kv.part.layers)):
        for part in kv.layer(layer):
            part.normal_()


def expected_of(
    key: ReservationId, frames: Sequence[Frame], table: tuple[BlockId, ...]
) -> ExpectedFrames:
    """Says where the frames of a hand-off go."""
    expected = {
        frame.index: ExpectedFrame(
            num_bytes=frame.num_bytes,
            prefill_rank=frame.prefill_rank,
            region=region_of(frame, table, 16),
        )
        for frame in frames
    }
    return ExpectedFrames(reservation_id=key, peer=INCARNATIONS[Role.PREFILL], frames=expected)


def sum_of(kv: KvTensors, table: Sequence[BlockId]) -> float:
    """Adds up a prompt's KV."""
    index = torch.tensor(table, device=kv.device)
    size = kv.geometry.block_size
    total = torch.zeros((), dtype=torch.float64, device=kv.device)
    for layer in range(len(kv.part.layers)):
        for part in kv.layer(layer):
            total += part.view(-1, size * part.shape[1] * part.shape[2])[index].double().sum()
    return float(total)


def plan_frames(context: RankContext, num_tokens: int, *, is_on_gpu: bool) -> tuple[Frame, ...]:
    """Cuts a prompt as both workers would."""
    handoff, geometry = context.config.handoff, context.geometry
    size = settle_frames(handoff, geometry, is_on_gpu=is_on_gpu).choose(num_tokens)
    pair = make_pair(geometry, geometry, handoff.wire_dtype)
    return make_manifest(pair, num_tokens, 0, size.tokens, size.layers).frames


class DecodeEnd:
    """Takes frames in."""

    def __init__(self, setting: Setting) -> None:
        """Listens."""
        self._setting = setting
        self.context = make_context(Role.DECODE, setting, None)
        device = find_link_device(self.context.kv, setting.handoff)
        self._links = make_receiver(self.context, device)
        self._unloader = RankUnloader(self.context.kv, self._links, device)

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where it listens."""
        return self._links.endpoint()

    def run(self, order: Order) -> dict[str, object]:
        """Waits until everything has landed and is scattered."""
        context = self.context
        is_on_gpu = not self._setting.is_trial
        frames = plan_frames(context, order.num_tokens, is_on_gpu=is_on_gpu)
        missing = {
            reservation_of(order, index): (index, set(range(len(frames))))
            for index in range(order.num_handoffs)
        }
        tables = {key: table_of(order, one[0], Role.DECODE) for key, one in missing.items()}
        for key, table in tables.items():
            self._unloader.expect(expected_of(key, frames, table))
        say({"ready": True})
        ends_s = {}
        while missing:
            for event in take_events(context.inbox):
                assert isinstance(event, FramePlaced | FrameLanded), event
                assert event.is_intact, event
                if isinstance(event, FrameLanded):
                    region = region_of(frames[event.frame_index], tables[event.reservation_id], 16)
                    self._unloader.unload(UnloadFrame(landed=event, region=region))
                    # A step launched now would wait on the device; here the host does.
                    synchronize(self._setting)
                index, left = missing[event.reservation_id]
                left.remove(event.frame_index)
                if not left:
                    ends_s[index] = time.monotonic()
                    self._unloader.withdraw(event.reservation_id)
                    del missing[event.reservation_id]
        answer: dict[str, object] = {"ends_s": [ends_s[index] for index in sorted(ends_s)]}
        if order.has_sum:
            last = table_of(order, order.num_handoffs - 1, Role.DECODE)
            answer |= {"sum": sum_of(context.kv, last), "memory": self._setting.count_memory()}
        answer["transport"] = [link.transport for link in self._links.links()]
        return answer


class PrefillEnd:
    """Ships frames, of KV that lies there or of prompts that it computes."""

    def __init__(self, setting: Setting, peer: LinkPeer, bench: Bench | None) -> None:
        """Begins to connect."""
        self._bench = bench
        self._setting = setting
        kv = None if bench is None else bench.stand.runner.kv  # type: ignore[attr-defined]
        self.context = make_context(Role.PREFILL, setting, kv)
        device = find_link_device(self.context.kv, setting.handoff)
        self._links = make_sender(self.context, device)
        self._marks: KvMarks | None = None
        if bench is not None and setting.leaves_early:
            self._marks = bench.stand.runner.marks  # type: ignore[attr-defined]
        self._shipper = RankShipper(self.context.kv, self._links, device, self._marks)
        self._ends = LinkEnds(peer.incarnation, 0, 0)
        self._peer = peer
        self._links.open(peer)

    def run(self, order: Order) -> dict[str, object]:
        """Hands prompts off and waits until all frames are sent."""
        if order.computes:
            return self._run_computing(order)
        answer = self._run_shipping(order)
        if order.has_sum:
            last = table_of(order, order.num_handoffs - 1, Role.PREFILL)
            total = sum_of(self.context.kv, last)
            answer |= {"sum": total, "memory": self._setting.count_memory()}
        return answer

    def close(self) -> None:
        """Ends its link."""
        self._shipper.close()

    def _run_shipping(self, order: Order) -> dict[str, object]:
        is_on_gpu = not self._setting.is_trial
        frames = plan_frames(self.context, order.num_tokens, is_on_gpu=is_on_gpu)
        starts_s = []
        for index in range(order.num_handoffs):
            if order.pause_s:
                time.sleep(order.pause_s)
            table = table_of(order, index, Role.PREFILL)
            orders = self._orders(frames, reservation_of(order, index), table)
            starts_s.append(time.monotonic())
            num_left = len(frames)
            self._ship(orders)
            while num_left:
                for event in take_events(self.context.inbox):
                    assert isinstance(event, FrameSent), event
                    num_left -= 1
                self._ship(orders)
        return {"starts_s": starts_s}

    def _orders(
        self,
        frames: Sequence[Frame],
        reservation_id: ReservationId,
        table: tuple[BlockId, ...],
        after_step: int | None = None,
    ) -> list[ShipFrame]:
        return [
            ShipFrame(
                prefill_rank=0,
                peer=self._peer,
                reservation_id=reservation_id,
                frame_index=frame.index,
                region=region_of(frame, table, 16),
                after_step=after_step,
            )
            for frame in frames
        ]

    def _ship(self, orders: list[ShipFrame]) -> None:
        while orders and self._shipper.has_room(self._ends):
            self._shipper.ship(orders.pop(0))

    def _run_computing(self, order: Order) -> dict[str, object]:
        """Computes prompts as a prefill rank does, and ships each."""
        assert self._bench is not None
        is_on_gpu = not self._setting.is_trial
        frames = plan_frames(self.context, order.num_tokens, is_on_gpu=is_on_gpu)

        def make_orders(
            index: int, table: tuple[BlockId, ...], step: int | None
        ) -> list[ShipFrame]:
            return self._orders(frames, reservation_of(order, index), table, step)

        stream = PromptStream(
            self._bench.stand,
            self.context.inbox,
            num_tokens=order.num_tokens,
            num_prompts=order.num_handoffs,
            seed=order.seed,
            make_orders=make_orders if order.ships else None,
            ship=self._ship,
            marks=self._marks,
        )
        answer: dict[str, object] = {"ends_s": stream.run()}
        if order.has_sum:
            answer["sum"] = sum_of(self.context.kv, stream.table_of(0))
        return answer


def take_events(inbox: Inbox) -> Iterator[object]:
    """Yields what links report, at least one event.

    Raises:
        RuntimeError: nothing came in time, or a link died.
    """
    events = inbox.drain(EVENT_TIMEOUT_S)
    if not events:
        raise RuntimeError(f"nothing came over the link in {EVENT_TIMEOUT_S} s")
    for event in events:
        if isinstance(event, LinkDown):
            raise RuntimeError(f"link down: {event.detail}")
        yield event


def say(answer: dict[str, object]) -> None:
    """Writes one line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Lives as one end until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--handoff", type=json.loads, default={}, help="fields of HandoffConfig")
    parser.add_argument("--endpoint", type=json.loads, help="of the decode end")
    parser.add_argument("--trial", action="store_true", help="on a CPU")
    parser.add_argument("--after-steps", action="store_true", help="no frame leaves during a step")
    parser.add_argument("--computes", action="store_true", help="load an engine")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    fields = arguments.handoff
    handoff = HandoffConfig(**{**fields, "transports": tuple(fields["transports"])})
    setting = Setting(
        handoff=handoff, is_trial=arguments.trial, leaves_early=not arguments.after_steps
    )
    end: DecodeEnd | PrefillEnd
    if arguments.role == "decode":
        end = DecodeEnd(setting)
        endpoint = end.endpoint
        say({"host": endpoint.host, "port": endpoint.port, "token": endpoint.token.hex()})
    else:
        told = arguments.endpoint
        endpoint = LinkEndpoint(
            host=told["host"], port=told["port"], token=bytes.fromhex(told["token"])
        )
        peer = LinkPeer(
            worker_id=WorkerId("decode-0"),
            incarnation=INCARNATIONS[Role.DECODE],
            endpoint=endpoint,
        )
        with contextlib.redirect_stdout(sys.stderr):
            bench = None
            if arguments.computes:
                layers = handoff.frame_layers or DEVICE_FRAME_LAYERS
                mark_layers = layers if setting.leaves_early else None
                bench = Bench(deterministic=False, mark_layers=mark_layers)
        end = PrefillEnd(setting, peer, bench)
        say({"ready": True})
    for line in sys.stdin:
        say(end.run(Order(**json.loads(line))))


if __name__ == "__main__":
    main()
