"""The door of `pdserve scale` and `pdserve flip`: who may come in, and what it does."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoscaler.controller import Controller
from autoscaler.figures import Reading, Traffic, WorkerFigures
from autoscaler.settings import MOST_REPLICAS, PoolRange, ScalingSettings
from launcher.cli import run_command
from launcher.commands.scale import show_scaling, tell_order
from launcher.control import ControlFile, ControlServer, call_control, control_folder, find_control
from pdserve.errors import ConfigError, InternalError
from pdserve.predictor.predictor import Predictor
from pdserve.request import Role
from pdserve.rpc.v1 import control_pb2
from pdserve.timeline import ManualClock


class FakePools:
    def __init__(self) -> None:
        self.orders: list[tuple[str, object]] = []
        self.is_broken = False
        self.names: tuple[str, ...] = tuple(f"{role}-0" for role in Role)
        self.roles: dict[str, Role] = {}
        """Of those that have flipped."""
        self.unheard: set[str] = set()
        """Whom the router does not know yet."""
        self.queued_tokens = 0
        self.on_read: Callable[[], None] = lambda: None

    def read(self) -> Reading:
        workers = tuple(
            WorkerFigures(
                worker_id=name,
                role=self.roles.get(name, Role(name.partition("-")[0])),
                is_serving=True,
                is_heard=name not in self.unheard,
                total_blocks=9,
                queued_tokens=self.queued_tokens if name.startswith("prefill") else 0,
                num_running=int(name == "decode-0"),
            )
            for name in self.names
        )
        traffic = Traffic(num_arrived=1, prompt_tokens=1, output_tokens=1, num_in_flight=1)
        self.on_read()
        return Reading(workers=workers, traffic=traffic)

    def scale(self, role: Role, num_replicas: int) -> None:
        if self.is_broken:
            raise InternalError("no room")
        self.orders.append((role, num_replicas))

    def drain(self, worker_id: str) -> None:
        self.orders.append(("drain", worker_id))

    def flip(self, worker_id: str, role: Role) -> None:
        if worker_id not in self.names:
            raise KeyError(worker_id)
        if self.is_broken:
            raise ConfigError("--flips is off")
        self.orders.append((f"flip to {role}", worker_id))
        self.roles[worker_id] = role
        self.unheard.add(worker_id)


class Door:
    def __init__(
        self, folder: Path, settings: ScalingSettings | None = None, cluster: str = "mine"
    ) -> None:
        self.pools = FakePools()
        self.clock = ManualClock()
        self.lines: list[str] = []
        self.controller = Controller(
            settings or ScalingSettings(),
            self.pools,
            self.pools,
            self.clock,
            predictor=Predictor(),
            report=self.lines.append,
        )
        self.server = ControlServer(self.controller, folder, cluster, has_prefill=True)

    def tick(self) -> None:
        self.clock.advance(1.0)
        self.controller.tick()

    def set_decode(self, least: int, most: int, *, is_dry_run: bool = False) -> list[str]:
        request = control_pb2.SetPoolsRequest(
            decode=control_pb2.PoolRange(least=least, most=most), is_dry_run=is_dry_run
        )
        answer = call_control(
            self.server.file, lambda stub, key: stub.SetPools(request, timeout=5, metadata=key)
        )
        return list(answer.changes)

    def flip(self, worker_id: str, role: str) -> None:
        request = control_pb2.FlipWorkerRequest(worker_id=worker_id, role=role)
        call_control(
            self.server.file, lambda stub, key: stub.FlipWorker(request, timeout=5, metadata=key)
        )


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path / "run")
    door.tick()
    yield door
    door.server.stop()


def test_dry_run_says_what_would_change_and_changes_nothing(door: Door) -> None:
    assert door.set_decode(3, 3, is_dry_run=True) == [
        "prefill: stays at 1",
        "decode: 2 more would start: 1 -> 3",
    ]
    door.tick()
    assert door.pools.orders == []


def test_new_range_is_carried_out_with_the_next_round(door: Door) -> None:
    door.set_decode(2, 3)
    door.tick()
    assert door.pools.orders == [(Role.DECODE, 2)]
    assert door.controller.settings.decode == PoolRange(least=2, most=3)
    assert door.lines[0].startswith("decode: grow 1 -> 2: below its range")


def test_order_that_fails_is_told_and_tried_again(door: Door) -> None:
    door.set_decode(2, 3)
    door.pools.is_broken = True
    door.tick()
    assert door.lines[-1] == "decode: not done: no room"
    door.pools.is_broken = False
    for _ in range(6):
        door.tick()
    assert door.pools.orders == [(Role.DECODE, 2)]


@pytest.mark.parametrize(
    ("flips_in_place", "order"),
    [(True, ("flip to prefill", "decode-1")), (False, ("drain", "decode-1"))],
)
def test_flip_is_ordered_in_place_only_where_replicas_can(
    flips_in_place: bool, order: tuple[str, str]
) -> None:
    pools, clock = FakePools(), ManualClock()
    pools.names = ("prefill-0", "decode-0", "decode-1")
    pools.queued_tokens = 50_000
    bounds = PoolRange(least=1, most=3)
    settings = ScalingSettings(
        prefill=bounds, decode=bounds, most_in_all=3, flips_in_place=flips_in_place
    )
    controller = Controller(settings, pools, pools, clock, predictor=Predictor())
    clock.advance(1.0)
    controller.tick()
    assert pools.orders == [order]


def test_replica_is_flipped_by_order_and_fixed_sizes_move_along(door: Door) -> None:
    door.pools.names = ("prefill-0", "prefill-1", "decode-0")
    request = control_pb2.SetPoolsRequest(prefill=control_pb2.PoolRange(least=2, most=2))
    call_control(door.server.file, lambda stub, key: stub.SetPools(request, metadata=key))
    door.tick()
    door.flip("prefill-1", "decode")
    assert door.lines[-1] == "decode: prefill-1 comes from the prefill pool, as ordered"
    for _ in range(600):
        door.tick()
    # No round has brought it back, nor anybody in its place.
    assert door.pools.orders == [("flip to decode", "prefill-1")]
    settings = door.controller.settings
    assert (settings.prefill, settings.decode) == (PoolRange(), PoolRange(least=2, most=2))


@pytest.fixture
def flipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """The only launcher that commands find; a second prefill replica can flip."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    door = Door(tmp_path / "pdserve")
    door.pools.names = ("prefill-0", "prefill-1", "decode-0")
    door.tick()
    yield door
    door.server.stop()


def test_flip_waits_until_the_router_takes_the_replica_in_its_new_role(
    flipping: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    find = flipping.controller.find_worker

    def look(worker_id: str) -> WorkerFigures | None:
        # The first looks are of before it registered, and of before the router heard of that.
        asked.append(worker_id)
        if len(asked) == 3:
            flipping.pools.unheard.clear()
        flipping.tick()
        return find(worker_id)

    flipping.controller.find_worker = look  # type: ignore[method-assign]
    assert run_command(["flip", "prefill-1", "decode", "--wait"]) == 0
    assert asked == ["prefill-1"] * 3
    assert re.fullmatch(
        r"prefill-1 drains to become a decode replica\n"
        r"prefill-1 serves as a decode replica after \d+\.\d s\n",
        capsys.readouterr().out,
    )


def test_flip_that_waits_in_vain_ends_with_status_1(
    flipping: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    # The launcher does not look again: it shows the replica as it was, serving in its old role.
    assert run_command(["flip", "prefill-1", "decode", "--wait", "--timeout-s", "0.2"]) == 1
    assert capsys.readouterr().err == (
        "pdserve: prefill-1 does not serve as a decode replica after 0.2 s\n"
    )


def test_flip_of_a_replica_that_leaves_meanwhile_is_not_waited_for(
    flipping: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    find = flipping.controller.find_worker

    def look(worker_id: str) -> WorkerFigures | None:
        flipping.pools.names = ("prefill-0", "decode-0")
        flipping.tick()
        return find(worker_id)

    flipping.controller.find_worker = look  # type: ignore[method-assign]
    assert run_command(["flip", "prefill-1", "decode", "--wait"]) == 2
    assert "there is no replica named 'prefill-1'" in capsys.readouterr().err


def test_range_is_stretched_to_hold_a_replica_that_was_moved() -> None:
    assert PoolRange(least=1, most=3).moved(1, 3) == PoolRange(least=1, most=4)
    assert PoolRange(least=2, most=3).moved(-1, 2) == PoolRange(least=1, most=3)
    assert PoolRange(least=1, most=3).moved(-1, 2) == PoolRange(least=1, most=3)
    with pytest.raises(ConfigError, match="at most"):
        PoolRange(least=MOST_REPLICAS, most=MOST_REPLICAS).moved(1, MOST_REPLICAS)


def test_figures_from_before_a_flip_decide_nothing(door: Door) -> None:
    door.pools.names = ("prefill-0", "prefill-1", "decode-0")
    request = control_pb2.SetPoolsRequest(prefill=control_pb2.PoolRange(least=2, most=2))
    call_control(door.server.file, lambda stub, key: stub.SetPools(request, metadata=key))
    door.tick()

    def flip_behind_their_back() -> None:
        door.pools.on_read = lambda: None
        door.flip("prefill-1", "decode")

    door.pools.on_read = flip_behind_their_back
    door.tick()
    assert door.pools.orders == [("flip to decode", "prefill-1")]


def test_flip_that_cannot_be_is_refused_and_changes_no_range(door: Door) -> None:
    before = door.controller.settings
    with pytest.raises(ConfigError, match="there is no replica named 'decode-7'"):
        door.flip("decode-7", "prefill")
    with pytest.raises(ConfigError, match="ROLE must be one of prefill, decode, got 'router'"):
        door.flip("decode-0", "router")
    door.pools.is_broken = True
    with pytest.raises(ConfigError, match="--flips is off"):
        door.flip("decode-0", "prefill")
    assert door.controller.settings == before
    assert door.pools.orders == []


def test_status_tells_pools_and_decisions(door: Door) -> None:
    door.set_decode(2, 3)
    door.tick()
    found = call_control(
        door.server.file,
        lambda stub, key: stub.GetScaling(control_pb2.GetScalingRequest(), timeout=5, metadata=key),
    )
    assert [(pool.role, pool.num_serving) for pool in found.pools] == [
        ("prefill", 1),
        ("decode", 1),
    ]
    assert found.decisions[0].text.startswith("decode: grow 1 -> 2")


def test_status_before_the_first_answer_of_a_router_shows_no_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door = Door(tmp_path / "run")

    def ask() -> control_pb2.GetScalingResponse:
        asked = control_pb2.GetScalingRequest()
        found: control_pb2.GetScalingResponse = call_control(
            door.server.file, lambda stub, key: stub.GetScaling(asked, timeout=5, metadata=key)
        )
        return found

    show_scaling(ask())
    assert capsys.readouterr().out == "no figures yet\n"
    assert door.set_decode(2, 3, is_dry_run=True)[1] == "decode: no figures yet, then 2..3"
    door.tick()
    show_scaling(ask())
    assert "no figures yet" not in capsys.readouterr().out
    door.server.stop()


def test_an_autoscaler_looks_as_soon_as_it_runs() -> None:
    pools, stopped = FakePools(), threading.Event()

    class FirstLook:
        def read(self) -> Reading:
            stopped.set()
            return pools.read()

    settings = ScalingSettings()
    controller = Controller(settings, FirstLook(), pools, ManualClock(), predictor=Predictor())
    controller.run(stopped)
    assert controller.numbers[Role.DECODE].num_serving == 1


def test_a_bound_that_cannot_be_is_told_by_its_flag(tmp_path: Path) -> None:
    door = Door(tmp_path / "run", ScalingSettings(most_in_all=3))
    door.tick()
    with pytest.raises(ConfigError, match="--max-replicas must be at least 6, got 3"):
        door.set_decode(5, 5)
    door.server.stop()


def test_range_that_cannot_be_is_refused(door: Door) -> None:
    with pytest.raises(ConfigError, match=r"0 <= MIN <= MAX, got 3\.\.2"):
        door.set_decode(3, 2)
    with pytest.raises(ConfigError, match="at least one replica"):
        door.set_decode(0, 0)


def test_caller_without_the_token_is_refused(door: Door) -> None:
    file = door.server.file
    stranger = ControlFile(path=file.path, address=file.address, token="0" * 64)
    with pytest.raises(ConfigError, match="token is missing"):
        call_control(
            stranger,
            lambda stub, key: stub.SetPools(control_pb2.SetPoolsRequest(), timeout=5, metadata=key),
        )


def test_only_the_owner_can_read_the_token(door: Door) -> None:
    path = door.server.file.path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_uid == os.getuid()


def test_the_only_launcher_needs_no_name_and_one_of_two_does(door: Door) -> None:
    folder = door.server.file.path.parent
    assert find_control(folder, None) == door.server.file
    other = Door(folder, cluster="other").server
    with pytest.raises(ConfigError, match="--cluster must name one of mine, other"):
        find_control(folder, None)
    assert find_control(folder, "other") == other.file
    other.stop()
    assert find_control(folder, None) == door.server.file


def test_file_of_a_launcher_that_was_killed_is_passed_over_and_taken_away(door: Door) -> None:
    folder = door.server.file.path.parent
    other = ControlFile(path=folder / "other.control", address="127.0.0.1:1", token="t")
    other.write()
    assert find_control(folder, "other") == other
    with pytest.raises(ConfigError, match="the launcher of other is gone"):
        call_control(other, lambda stub, key: stub.GetScaling(control_pb2.GetScalingRequest()))
    assert find_control(folder, None) == door.server.file
    assert not other.path.exists()


def test_file_goes_with_its_launcher(tmp_path: Path) -> None:
    door = Door(tmp_path)
    door.server.stop()
    with pytest.raises(ConfigError, match="no pdserve serve runs here"):
        find_control(tmp_path, None)


def test_folder_is_the_users_own() -> None:
    assert control_folder("/run/user/7") == Path("/run/user/7/pdserve")
    assert control_folder(None).name == f"pdserve-{os.getuid()}"


@pytest.mark.parametrize(
    ("preview", "told"),
    [
        ("decode: 1 more would start: 1 -> 2", "decode: 1 -> 2"),
        ("prefill: prefill-1 would leave: 2 -> 1", "prefill: 2 -> 1"),
        ("decode: stays at 1", "decode: stays at 1"),
    ],
)
def test_order_promises_a_size_and_not_who_leaves(preview: str, told: str) -> None:
    assert tell_order(preview) == told
