"""What simulated workers share: lives, a skewed clock, crashes and freezes."""

from typing import TYPE_CHECKING

from kv_transfer.protocol import (
    Identity,
)
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.request import (
    Incarnation,
    Request,
    WorkerId,
)

if TYPE_CHECKING:
    from tests.unit.kv_transfer.world import World

GEOMETRY = KvGeometry(
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    block_size=16,
    dtype="float32",
    model_revision="test",
)
CONFIG = HandoffConfig(
    frame_tokens=64,
    lease_s=4.0,
    hold_s=6.0,
    call_timeout_s=1.0,
    frame_timeout_s=2.0,
)

FROZEN_AFTER_S = 2.0


class SkewedClock:
    """The world's time plus an offset that differs between workers."""

    def __init__(self, world: "World", offset_s: float) -> None:
        self._world = world
        self._offset_s = offset_s

    def now(self) -> float:
        return self._world.now_s + self._offset_s


def token_of(request: Request) -> int:
    return sum(request.token_ids) % 1000


class Node:
    def __init__(self, world: "World", worker_id: WorkerId) -> None:
        self.world = world
        self.worker_id = worker_id
        self.incarnation = Incarnation(0)
        self.is_alive = False
        self.frozen_until_s = 0.0
        self.boot()

    def boot(self) -> None:
        self.incarnation = Incarnation(self.world.rng.getrandbits(64))
        self.clock = SkewedClock(self.world, self.world.rng.uniform(-1, 1) * self.world.skew_s)
        self.is_alive = True
        self.frozen_until_s = 0.0
        self.start()

    def crash(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        life = self.incarnation
        self.stop()
        self.world.after(self.world.rng.uniform(0.3, 2.0), self.boot)
        self.world.after(1.0, lambda: self.world.router.worker_died(self.worker_id, life))

    def freeze(self) -> None:
        if not self.is_alive:
            return
        length_s = self.world.rng.uniform(0.5, 8.0)
        self.frozen_until_s = self.world.now_s + length_s
        if length_s > FROZEN_AFTER_S:
            life = self.incarnation
            self.world.after(
                FROZEN_AFTER_S, lambda: self.world.router.worker_died(self.worker_id, life)
            )

    def me(self) -> Identity:
        return Identity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            compatibility_digest=GEOMETRY.digest(),
            shape=GEOMETRY.shape,
        )

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError
