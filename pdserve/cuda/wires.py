"""One-way connections between the GPUs of a pipeline on several hosts, over NCCL.

A wire is a communicator of two members, in whose streams nothing else runs. The two ends meet by an
id that the sender makes and that the ranks exchange while they load. In the ring of stages every
other one meets the stage behind it first, so that none waits for one that waits for it.
"""

from typing import Protocol

import torch
from torch import Tensor

from pdserve.cuda.nccl import NcclFault, NcclPair, make_unique_id
from pdserve.errors import ConfigError
from pdserve.layers.parallel import Shard
from pdserve.rank.exchange import RankExchange

MEETING_TIMEOUT_S = 60.0
"""All ranks have loaded when they meet."""
MAX_CTAS = 4
"""Thread blocks of a transfer, which may wait long for its peer: as few as a network needs."""
SENDER, RECEIVER = 0, 1
Mark = torch.cuda.Event | None
"""A point in a stream; None, where there are no streams, is one that is passed."""


class Wire(Protocol):
    """One end. Both ends make the same transfers in the same order; none waits for the host."""

    def send(self, payload: Tensor) -> Mark:
        """Sends what the engine's stream has written by here; returns when it may be written."""
        ...

    def receive(self, slot: Tensor, free: Mark) -> Mark:
        """Receives into a slot once that is free; returns when it is filled."""
        ...

    def close(self) -> None:
        """Ends what is under way."""
        ...


class NcclWire:
    """A wire between two GPUs."""

    def __init__(self, pair: NcclPair, device: torch.device) -> None:
        """Owns one end of a communicator."""
        self._pair = pair
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def send(self, payload: Tensor) -> Mark:
        """Sends; see `Wire`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._pair.send(payload, self._stream)
        return self._mark()

    def receive(self, slot: Tensor, free: Mark) -> Mark:
        """Receives; see `Wire`."""
        if free is not None:
            self._stream.wait_event(free)
        self._pair.receive(slot, self._stream)
        return self._mark()

    def close(self) -> None:
        """Aborts it."""
        self._pair.abort()

    def _mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event


class MakeWires(Protocol):
    """Connects a rank to those of its number in the stages around it; called by all ranks."""

    def __call__(
        self, exchange: RankExchange, shard: Shard, device: torch.device
    ) -> tuple[Wire, Wire]:
        """Returns the wire to the stage behind, and the one from the stage before."""
        ...


def connect_nccl_wires(
    exchange: RankExchange, shard: Shard, device: torch.device
) -> tuple[Wire, Wire]:
    """Meets the stages around; see `MakeWires`.

    Raises:
        ConfigError: NCCL finds no way to one of them.
    """
    before = rank_before(exchange.rank, shard)
    try:
        own_id = make_unique_id()
        ids = exchange.exchange("wires", own_id)
        if shard.part.stage % 2 == 0:
            behind = _meet(own_id, SENDER, device)
            return behind, _meet(ids[before], RECEIVER, device)
        source = _meet(ids[before], RECEIVER, device)
        return _meet(own_id, SENDER, device), source
    except NcclFault as error:
        raise ConfigError(
            f"device cuda: stages on several hosts need NCCL between their GPUs: {error}",
            settings=("device",),
        ) from None


def rank_before(rank: int, shard: Shard) -> int:
    """Returns the rank of the same number in the stage before; the last one is before the first."""
    width = shard.tensor_parallel
    return (rank - width) % (width * shard.num_stages)


def _meet(unique_id: bytes, member: int, device: torch.device) -> NcclWire:
    pair = NcclPair(
        unique_id,
        member,
        device,
        max_ctas=MAX_CTAS,
        timeout_s=MEETING_TIMEOUT_S,
        is_given_up=lambda: False,
    )
    wire = NcclWire(pair, device)
    # The first transfer sets the connection up, and its memory.
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    (wire.send(token) if member == SENDER else wire.receive(token, None))
    torch.cuda.synchronize(device)
    return wire
