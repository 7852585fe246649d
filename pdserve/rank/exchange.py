"""What the ranks of a replica tell each other while they load, in a store that they share."""

from datetime import timedelta

from torch._C._distributed_c10d import Store

TIMEOUT_S = 600.0
"""Longer than loading takes on the slowest rank: a dead one is seen elsewhere, and sooner."""


class RankExchange:
    """All ranks of a replica. Every call is made by all of them, each topic once."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        """Keeps a store that all ranks have in common."""
        self.rank = rank
        self._store = store
        self._num_ranks = num_ranks
        store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def exchange(self, topic: str, data: bytes) -> tuple[bytes, ...]:
        """Returns what each rank has to say about a topic, once all of them have.

        Raises:
            RuntimeError: one of them has not in time.
        """
        # Hexadecimal: the store takes text.
        self._store.set(f"{topic}/{self.rank}", data.hex())
        told = (self._store.get(f"{topic}/{rank}") for rank in range(self._num_ranks))
        return tuple(bytes.fromhex(one.decode()) for one in told)


def agree_on_least(exchange: RankExchange | None, topic: str, count: int) -> int:
    """Returns the smallest of all ranks' counts; an only rank's is its own."""
    if exchange is None:
        return count
    return min(int(told) for told in exchange.exchange(topic, str(count).encode()))
