"""The tensor ranks of a stage, as each of them sees the others: sums and gathers over their rings.

    allocate the own ring -> tell its handle, once it is empty -> open the others'

Letters: M rows, E hidden, S partial sums of a product, R rows, N columns of one rank, V of all.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.peer_memory import OpenedBuffer, PeerBuffer
from pdserve.cuda.runtime import CudaFault
from pdserve.errors import ConfigError, WorkerLost
from pdserve.kernels.all_gather import gather_over_ranks
from pdserve.kernels.all_reduce import add_norm_over_ranks
from pdserve.kernels.peer_ring import EMPTY_WORD, NUM_SLOTS, NUM_STATE_WORDS, PeerRing
from pdserve.kernels.two_shot import add_norm_in_two_shots
from pdserve.rank.exchange import RankExchange

MAX_POLLS = 1 << 25
"""A rank that nothing was heard of for about 20 s is given up: a process that only was slow to
compile kernels is waited for, and the death of one is seen sooner elsewhere."""
PROGRAMS_PER_SM = 3
MIN_TWO_SHOT_ROWS = 256
"""Of three ranks and more. Two send no byte less in two shots, and have none."""
MAX_RING_ROWS = 4096
"""More rows go over the rings in pieces: as quick on two H200s, and 64 MiB a slot and rank are kept
for KV."""
NUM_HOST_FLAGS = 16
"""One is written while all other steps in flight wait to be read, two a stage."""


class SharedMemory(Protocol):
    """Memory of one rank that others can reach."""

    @property
    def tensor(self) -> Tensor:
        """uint8."""
        ...

    def close(self) -> None:
        """Gives it up."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryKind:
    """How memory is shared."""

    allocate: Callable[[int], tuple[SharedMemory, bytes]]
    """Returns so many bytes and a handle on them."""
    open: Callable[[bytes, int], SharedMemory]
    """Opens another rank's handle."""


class FileMemory:
    """Memory of processes without a GPU: a mapped file."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Maps it, and makes it if need be."""
        with path.open("a+b") as file:
            file.truncate(num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Leaves it to its last user."""
        self.tensor = self.tensor[:0].clone()


def share_device_memory(device: torch.device) -> MemoryKind:
    """Shares a GPU's memory."""

    def allocate(num_bytes: int) -> tuple[SharedMemory, bytes]:
        buffer = PeerBuffer(num_bytes, device)
        return buffer, buffer.handle

    return MemoryKind(
        allocate=allocate, open=lambda handle, size: OpenedBuffer(handle, size, device)
    )


def share_files(folder: Path, name: str) -> MemoryKind:
    """Shares files in a folder; those that begin with `name` are this rank's own."""
    numbers = count()

    def allocate(num_bytes: int) -> tuple[SharedMemory, bytes]:
        file_name = f"{name}-{next(numbers)}"
        return FileMemory(folder / file_name, num_bytes), file_name.encode()

    return MemoryKind(
        allocate=allocate, open=lambda handle, size: FileMemory(folder / handle.decode(), size)
    )


class TensorRanks:
    """This rank's rings. Calls are made by all ranks of the stage, in the same order."""

    def __init__(
        self,
        ring: PeerRing,
        device: Device,
        memory: Sequence[SharedMemory],
        *,
        is_deterministic: bool = False,
    ) -> None:
        """Owns the memory that the rings lie in.

        Args:
            ring: of this rank.
            device: likewise.
            memory: of all rings.
            is_deterministic: no row's bits depend on how many there are.
        """
        self._min_two_shot_rows = None
        if ring.num_ranks > 2 and not is_deterministic:
            self._min_two_shot_rows = MIN_TWO_SHOT_ROWS
        self.rank = ring.rank
        self.size = ring.num_ranks
        self._ring = ring
        self._memory = tuple(memory)
        self._flags = [device.pinned((1,), torch.int32) for _ in range(NUM_HOST_FLAGS)]
        self._turn = 0
        self._use_pdl = device.has_dependent_launch

    @property
    def num_bytes(self) -> int:
        """What the own ring takes."""
        return self._ring.rings[self.rank].nbytes

    def add_norm(
        self,
        x_SME: Tensor,
        residual_ME: Tensor,
        weight_E: Tensor,
        out_ME: Tensor,
        *,
        epsilon: float,
        has_residual: bool = True,
    ) -> None:
        """Adds what all ranks have parts of to the residual, and norms the sum."""
        num_rows, width = out_ME.shape
        rows_at_once = self._ring.words * 4 // residual_ME.dtype.itemsize // width
        for start in range(0, num_rows, rows_at_once):
            rows = slice(start, start + rows_at_once)
            count = min(rows_at_once, num_rows - start)
            least = self._min_two_shot_rows
            is_short = least is None or count < least
            launch = add_norm_over_ranks if is_short else add_norm_in_two_shots
            launch(
                x_SME[:, rows],
                residual_ME[rows],
                weight_E,
                out_ME[rows],
                self._ring,
                epsilon=epsilon,
                has_residual=has_residual,
                use_pdl=self._use_pdl,
            )

    def gather(self, x_RN: Tensor, out_RV: Tensor) -> Tensor:
        """Puts all ranks' columns side by side, float32 or int32; returns them."""
        gather_over_ranks(x_RN, out_RV, self._ring, use_pdl=self._use_pdl)
        return out_RV

    def set_patience(self, max_polls: int) -> None:
        """Changes how long others are waited for, but in graphs that are captured already."""
        self._ring = replace(self._ring, max_polls=max_polls)

    def watch(self) -> "RankWatch":
        """Returns what says, once the stream got here, whether a rank was missed until here."""
        self._turn = (self._turn + 1) % NUM_HOST_FLAGS
        flag = self._flags[self._turn]
        flag.copy_(self._ring.failed, non_blocking=True)
        return RankWatch(flag)

    def close(self) -> None:
        """Gives the rings up; nothing may be in flight."""
        for memory in self._memory:
            memory.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShare:
    """The part of the vocabulary that this rank computes logits of."""

    ranks: TensorRanks
    token_ids: range
    max_tokens: int
    """Of any rank."""
    gather: Callable[[Tensor], Tensor]
    """Returns the logits of all ranks, for rows of this rank's [R, N]; overwritten by the next."""


@dataclass(frozen=True, slots=True)
class RankWatch:
    """Whether the ranks of a step were all there."""

    _flag: Tensor

    def check(self) -> None:
        """Call once the step has ended.

        Raises:
            WorkerLost: a rank did not send its part in time; what was computed is worth nothing.
        """
        if int(self._flag):
            raise WorkerLost("a rank of this replica did not send its part of a step in time")


def connect_tensor_ranks(
    exchange: RankExchange,
    members: Sequence[int],
    num_bytes: int,
    device: Device,
    kind: MemoryKind | None = None,
    *,
    is_deterministic: bool = False,
) -> TensorRanks:
    """Allocates and opens the rings of a stage. Called by all ranks of the replica.

    Args:
        exchange: of all ranks.
        members: the stage's ranks, in order; this one is among them.
        num_bytes: that a rank sends at once, at most; the same on all of them.
        device: of this rank.
        kind: how memory is shared; None: between GPUs.
        is_deterministic: no row's bits depend on how many there are.

    Raises:
        ConfigError: the GPUs cannot reach each other.
    """
    kind = kind or share_device_memory(device.torch_device)
    shape = (NUM_SLOTS.value, len(members) - 1, -(-num_bytes // 16) * 4)
    num_words = shape[0] * shape[1] * shape[2]

    def view(memory: SharedMemory) -> Tensor:
        return memory.tensor[: 4 * num_words].view(torch.int32).view(shape)

    own, handle = kind.allocate(4 * num_words)
    view(own).fill_(EMPTY_WORD.value)
    device.synchronize()
    handles = exchange.exchange("rings", handle)
    try:
        memory = [
            own if rank == exchange.rank else kind.open(handles[rank], 4 * num_words)
            for rank in members
        ]
    except CudaFault as error:
        raise ConfigError(
            "tensor_parallel: the GPUs of a replica must reach each other's memory, as over "
            f"NVLink: {error}",
            settings=("tensor_parallel",),
        ) from None
    rings = tuple(view(one) for one in memory)
    ring = PeerRing(
        rank=members.index(exchange.rank),
        rings=rings,
        halves=tuple(one.view(torch.int16) for one in rings),
        state=device.zeros((NUM_STATE_WORDS,), torch.int32),
        max_programs=PROGRAMS_PER_SM * device.num_sms,
        max_polls=MAX_POLLS,
    )
    return TensorRanks(ring, device, memory, is_deterministic=is_deterministic)
