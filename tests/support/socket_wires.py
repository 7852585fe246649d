"""Wires between stages where there is no GPU: Unix sockets; each transfer waits for its end."""

import socket
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pdserve.cuda.wires import Wire, rank_before
from pdserve.layers.parallel import Shard
from pdserve.rank.exchange import RankExchange

TIMEOUT_S = 60.0


class SocketWire:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, payload: Tensor) -> None:
        assert payload.is_contiguous()
        self._socket.sendall(payload.flatten().view(torch.uint8).numpy().tobytes())

    def receive(self, slot: Tensor, free: object) -> None:
        assert slot.is_contiguous()
        room = memoryview(slot.flatten().view(torch.uint8).numpy())
        while room:
            count = self._socket.recv_into(room)
            if not count:
                raise ConnectionError("the stage before is gone")
            room = room[count:]

    def close(self) -> None:
        self._socket.close()


def socket_wires(
    folder: Path,
) -> Callable[[RankExchange, Shard, torch.device], tuple[Wire, Wire]]:
    """Makes wires over sockets in a folder that all ranks see."""

    def connect(exchange: RankExchange, shard: Shard, device: torch.device) -> tuple[Wire, Wire]:
        with socket.socket(socket.AF_UNIX) as listener:
            path = folder / f"wire-{exchange.rank}"
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(TIMEOUT_S)
            paths = exchange.exchange("wires", str(path).encode())
            behind = next(
                rank for rank in range(len(paths)) if rank_before(rank, shard) == exchange.rank
            )
            outgoing = socket.socket(socket.AF_UNIX)
            outgoing.settimeout(TIMEOUT_S)
            outgoing.connect(paths[behind].decode())
            incoming, _ = listener.accept()
            incoming.settimeout(TIMEOUT_S)
        return SocketWire(outgoing), SocketWire(incoming)

    return connect
