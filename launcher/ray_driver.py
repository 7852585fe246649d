"""The driver of a Ray cluster: keeps one actor per replica, as the launcher orders.

A life: placing -> starting -> running -> ended. Whatever goes wrong with the actor ends the life;
the launcher decides when the next one begins, by the same back-off as for local processes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.ray_actor import FaceActor, FaceReport
from launcher.ray_messages import (
    DrainFace,
    FaceEnded,
    FaceLine,
    FaceStarted,
    KillFace,
    Message,
    StartFace,
    decode,
    encode,
)
from launcher.ray_placement import RayNode, explain_wait, place_replica
from pdserve.rpc.channel import BlockingChannel, ChannelClosed

_KILLED = -9
_POLL_S = 0.1
_PATIENCE_S = 10.0
"""After this long without room, the user is told."""


class FaceLife:
    """One life of one replica, from its placement group to its end."""

    def __init__(self, order: StartFace, send: Callable[[Message], None]) -> None:
        """Starts nothing yet."""
        self._order = order
        self._send = send
        self._steps = self._live()
        self._group: PlacementGroup | None = None
        self._actor: ActorHandle[FaceActor] | None = None
        self._is_draining = False
        self.is_over = False

    def advance(self) -> None:
        """Looks once, without waiting, whether anything has happened."""
        try:
            next(self._steps)
        except StopIteration:
            self.end(0)
        except RayError as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            self._send(FaceLine(life=self._order.life, text=f"its actor is gone: {first_line}"))
            self.end(_KILLED)

    def drain(self) -> None:
        """Asks the face to end; a life that has none yet ends at once."""
        self._is_draining = True
        if self._actor is None:
            self.end(0)
        else:
            self._actor.drain.remote()

    def end(self, status: int) -> None:
        """Kills the actor, and with it face and ranks, and gives up its place."""
        if self.is_over:
            return
        self.is_over = True
        with suppress(RayError):
            if self._actor is not None:
                ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._send(FaceEnded(life=self._order.life, status=status))

    def _live(self) -> Iterator[None]:
        order = self._order
        machine = _own_machine()
        placement = place_replica(order.num_ranks, machine)
        self._group = placement_group(
            [dict(bundle) for bundle in placement.bundles],
            strategy=placement.strategy,
            name=f"{order.name}-{order.life}",
        )
        yield from self._await_room(self._group, machine)
        actor = (
            ray.remote(FaceActor)
            .options(
                name=f"{order.name}-{order.life}",
                num_cpus=1,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote()
        )
        assert isinstance(actor, ActorHandle), "not a local-mode object"
        self._actor = actor
        started: ray.ObjectRef[int] = actor.start.remote(order.name, order.argv, dict(order.env))
        yield from _await(started)
        self._send(FaceStarted(life=order.life, pid=ray.get(started)))
        while True:
            asked = actor.report.remote()
            yield from _await(asked)
            report: FaceReport = ray.get(asked)
            for line in report.lines:
                self._send(FaceLine(life=order.life, text=line))
            if report.status is not None:
                self.end(report.status)
                return
            yield

    def _await_room(self, group: PlacementGroup, machine: str) -> Iterator[None]:
        since_s = time.monotonic()
        was_told = False
        while not group.wait(0):
            if not was_told and time.monotonic() - since_s > _PATIENCE_S:
                was_told = True
                nodes = tuple(_list_nodes().values())
                text = explain_wait(self._order.num_ranks, machine, nodes)
                self._send(FaceLine(life=self._order.life, text=text))
            yield


def _own_machine() -> str:
    """Returns the address of the node that this driver joined, as the cluster calls it."""
    return _list_nodes()[ray.get_runtime_context().get_node_id()].address


def _list_nodes() -> dict[str, RayNode]:
    """Returns the living nodes by their ids."""
    return {
        str(node["NodeID"]): RayNode(
            address=str(node["NodeManagerAddress"]),
            num_cpus=float(node["Resources"].get("CPU", 0.0)),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call] # it has no annotations
        if node["Alive"]
    }


def _await(reference: "ray.ObjectRef[object]") -> Iterator[None]:
    while not ray.wait([reference], timeout=0, fetch_local=False)[0]:
        yield


class RayDriver:
    """Carries out the launcher's orders until the launcher is gone."""

    def __init__(self, channel: BlockingChannel, is_ray_alive: Callable[[], bool]) -> None:
        """Owns the channel; Ray is connected already."""
        self._channel = channel
        self._is_ray_alive = is_ray_alive
        self._orders: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lives: dict[int, FaceLife] = {}

    def run(self) -> bool:
        """Works until the launcher closes the channel; False if Ray died before."""
        threading.Thread(target=self._receive, name="orders", daemon=True).start()
        while self._is_ray_alive():
            try:
                order = self._orders.get(timeout=_POLL_S)
            except queue.Empty:
                self._advance_all()
                continue
            if order is None:
                return True
            self._carry_out(order)
        return False

    def _receive(self) -> None:
        with suppress(ChannelClosed):
            while True:
                self._orders.put(decode(self._channel.receive()))
        self._orders.put(None)

    def _carry_out(self, order: Message) -> None:
        match order:
            case StartFace():
                self._lives[order.life] = FaceLife(order, self._send)
            case DrainFace():
                if order.life in self._lives:
                    self._lives[order.life].drain()
            case KillFace():
                if order.life in self._lives:
                    self._lives[order.life].end(_KILLED)
            case _:
                raise AssertionError(f"no order: {order}")

    def _advance_all(self) -> None:
        for life in self._lives.values():
            if not life.is_over:
                life.advance()
        self._lives = {number: life for number, life in self._lives.items() if not life.is_over}

    def _send(self, message: Message) -> None:
        # The launcher's end shows in the orders.
        with suppress(ChannelClosed):
            self._channel.send(encode(message))
