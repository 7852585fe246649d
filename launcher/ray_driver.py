"""The driver of a Ray cluster: keeps one actor per replica, as the launcher orders.

A life: placing -> starting -> running -> ended. Whatever goes wrong with the actor ends the life;
the launcher decides when the next one begins, by the same back-off as for local processes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.ray_actor import FaceActor, FaceReport
from launcher.ray_messages import (
    DrainFace,
    FaceEnded,
    FaceLine,
    FaceStarted,
    FlipFace,
    KillFace,
    Message,
    StartFace,
    decode,
    encode,
)
from launcher.ray_placement import RayNode, ReplicaNeeds, explain_wait, place_replica
from pdserve.rpc.channel import BlockingChannel, ChannelClosed

_KILLED = -9
_POLL_S = 0.1
_PATIENCE_S = 10.0
"""After this long without room, the user is told."""


class FaceLife:
    """One life of one replica, from its placement group to its end.

    Beside the actor of the face there is one for each stage that is spread to another bundle.
    """

    def __init__(self, order: StartFace, send: Callable[[Message], None]) -> None:
        """Starts nothing yet."""
        self._order = order
        self._send = send
        self._steps = self._live()
        self._group: PlacementGroup | None = None
        self._actors: tuple[ActorHandle[FaceActor], ...] = ()
        self.is_over = False

    def advance(self) -> None:
        """Looks once, without waiting, whether anything has happened."""
        try:
            next(self._steps)
        except StopIteration:
            self.end(0)
        except RayError as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            self._tell(f"its actor is gone: {first_line}")
            self.end(_KILLED)

    def drain(self) -> None:
        """Asks the face to end; a life that has none yet ends at once."""
        if not self._actors:
            self.end(0)
        else:
            self._actors[0].drain.remote()

    def flip(self) -> None:
        """Asks the face to go on in the other pool; the launcher asks only one that has served."""
        if self._actors:
            self._actors[0].flip.remote()

    def end(self, status: int) -> None:
        """Kills the actors, and with them face and ranks, and gives up their place."""
        if self.is_over:
            return
        self.is_over = True
        with suppress(RayError):
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._send(FaceEnded(life=self._order.life, status=status))

    def _live(self) -> Iterator[None]:
        order = self._order
        needs = ReplicaNeeds(
            ranks_of_bundles=order.ranks_of_bundles,
            uses_gpus=order.uses_gpus,
            machine=None if order.is_anywhere else _own_machine(),
            resource=order.resource,
        )
        placement = place_replica(needs)
        self._group = placement_group(
            [dict(bundle) for bundle in placement.bundles],
            strategy=placement.strategy,
            name=f"{order.name}-{order.life}",
        )
        yield from self._await_room(self._group, needs)
        argvs = (order.argv, *order.stages)
        if order.is_anywhere:
            # The last of two equal flags counts.
            hosts = _hosts_of(self._group)
            argvs = tuple(
                (*argv, "--host", host) for argv, host in zip(argvs, hosts, strict=True)
            )  # fmt: skip
        self._actors = tuple(self._start_actor(bundle) for bundle in range(len(argvs)))
        started: list[ray.ObjectRef[int]] = [
            actor.start.remote(name, argv, dict(order.env))
            for actor, name, argv in zip(self._actors, self._names(), argvs, strict=True)
        ]
        for reference in started:
            yield from _await(reference)
        pids: list[int] = ray.get(started)
        self._send(FaceStarted(life=order.life, pid=pids[0]))
        while True:
            asked = [actor.report.remote() for actor in self._actors]
            for reference in asked:
                yield from _await(reference)
            reports: list[FaceReport] = ray.get(asked)
            if self._take(reports):
                return
            yield

    def _take(self, reports: Sequence[FaceReport]) -> bool:
        """Passes lines on; ends the life with the first process that has ended."""
        for name, report in zip(self._names(), reports, strict=True):
            for line in report.lines:
                self._tell(line)
            if report.status is not None:
                if name != self._order.name:
                    self._tell(f"{name} ended with status {report.status}")
                self.end(report.status)
                return True
        return False

    def _names(self) -> list[str]:
        name = self._order.name
        return [name, *(f"{name}-stage{number + 1}" for number in range(len(self._order.stages)))]

    def _start_actor(self, bundle: int) -> "ActorHandle[FaceActor]":
        order = self._order
        assert self._group is not None
        actor = (
            ray.remote(FaceActor)
            .options(
                name=f"{self._names()[bundle]}-{order.life}",
                num_cpus=1,
                num_gpus=order.ranks_of_bundles[bundle] if order.uses_gpus else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
        )
        assert isinstance(actor, ActorHandle), "not a local-mode object"
        return actor

    def _await_room(self, group: PlacementGroup, needs: ReplicaNeeds) -> Iterator[None]:
        since_s = time.monotonic()
        was_told = False
        while not group.wait(0):
            if not was_told and time.monotonic() - since_s > _PATIENCE_S:
                was_told = True
                self._tell(explain_wait(needs, tuple(_list_nodes().values())))
            yield

    def _tell(self, text: str) -> None:
        self._send(FaceLine(life=self._order.life, text=text))


def _own_machine() -> str:
    """Returns the address of the node that this driver joined, as the cluster calls it."""
    return _list_nodes()[ray.get_runtime_context().get_node_id()].address


def _hosts_of(group: PlacementGroup) -> list[str]:
    """Returns the address of each bundle's node."""
    nodes = _list_nodes()
    table = placement_group_table(group)
    found: dict[int, str] = table["bundles_to_node_id"]
    return [nodes[found[bundle]].address for bundle in sorted(found)]


def _list_nodes() -> dict[str, RayNode]:
    """Returns the living nodes by their ids."""
    return {
        str(node["NodeID"]): RayNode(
            address=str(node["NodeManagerAddress"]),
            num_cpus=float(node["Resources"].get("CPU", 0.0)),
            num_gpus=float(node["Resources"].get("GPU", 0.0)),
            others=frozenset(map(str, node["Resources"])) - {"CPU", "GPU"},
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call] # it has no annotations
        if node["Alive"]
    }


def _await(reference: "ray.ObjectRef[Any]") -> Iterator[None]:
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
            case FlipFace():
                if order.life in self._lives:
                    self._lives[order.life].flip()
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
