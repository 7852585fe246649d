"""The stages of a pipeline of GPUs in one host: activations and sampled ids go from one to another.

    stage 0       await ids -> embed, layers -> push activations, raise the flag behind
    stage 1 ...   await activations -> layers -> push ...
    last stage    await activations -> layers, head, sampling -> push ids to stage 0, raise its flag

What a stage is sent lies in its own memory, in a ring with a place for each step in flight: a place
is written again when the result of the step that it was for has been taken, and so by nobody who
could be ahead. Both the residual and its norm are sent: a row has the bits that it has on one GPU.

Flags are raised and awaited on the device: the host launches ahead and waits for nothing.

Letters: M rows, E hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.tensor_ranks import MemoryKind, RankWatch, SharedMemory, share_device_memory
from pdserve.cuda.workspace import RowBuffers
from pdserve.kernels.stage_flags import await_flag, raise_flag
from pdserve.layers.parallel import Shard
from pdserve.rank.exchange import RankExchange

MAX_POLLS = 1 << 26
"""A stage that nothing was heard of for about 40 s is given up; a death is seen sooner."""
STEPS_PER_STAGE = 2
"""In flight: one in each stage, and as many that wait on the devices already."""
FLAG_BYTES = 256
_ACTIVATIONS_FLAG = 0
_IDS_FLAG = 16
"""Words; each flag has a cache line of its own."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRoom:
    """Sizes of what stages send; the same on all of them."""

    num_stages: int
    max_rows: int
    max_samples: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def max_steps_in_flight(self) -> int:
        """Places for activations."""
        return STEPS_PER_STAGE * self.num_stages

    @property
    def num_id_rows(self) -> int:
        """A row may be awaited by the last step in flight, and is read until that one has ended."""
        return 2 * self.max_steps_in_flight

    @property
    def ids_bytes(self) -> int:
        """All rows of ids, int32."""
        return self.num_id_rows * self.max_samples * torch.int32.itemsize

    @property
    def activation_bytes(self) -> int:
        """Residual and norm of all steps in flight."""
        values = 2 * self.max_steps_in_flight * self.max_rows * self.hidden_size
        return values * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """What each stage allocates."""
        return FLAG_BYTES + _aligned(self.ids_bytes) + self.activation_bytes


class Stages(Protocol):
    """A rank's place in a pipeline. All stages launch the same steps in the same order."""

    room: StageRoom
    is_first: bool
    is_last: bool
    is_leader: bool
    is_sampler: bool
    """Whether this rank's host tells the leader's what was sampled."""

    @property
    def ids(self) -> Tensor:
        """What recent steps sampled, int32, on stage 0: `AwaitedIds` says where."""
        ...

    def enter(self, number: int, awaited: int | None, buffers: RowBuffers) -> None:
        """Lets the device wait for what a step needs, and takes activations of the stage before.

        Args:
            number: of the step, counted from 1 on.
            awaited: the last step whose tokens it awaits.
            buffers: of the step's rows, padding included.
        """
        ...

    def leave(self, number: int, buffers: RowBuffers) -> None:
        """Gives activations to the stage behind; not called on the last one."""
        ...

    def return_ids(self, number: int, ids: Tensor) -> None:
        """Gives what the last stage sampled to stage 0; the rows are those of the step."""
        ...

    def expect_ids(self, number: int, num_rows: int) -> None:
        """Says on stage 0 that the last one will return so many rows of ids."""
        ...

    def watch(self, number: int) -> RankWatch:
        """Returns what says, once the stream got here, whether a stage was missed until here."""
        ...

    def close(self) -> None:
        """Gives up what joins the stages."""
        ...


class _StageMemory:
    """The parts of one stage's memory."""

    def __init__(self, memory: SharedMemory, room: StageRoom) -> None:
        self._memory = memory
        flags = memory.tensor[:FLAG_BYTES].view(torch.int32)
        self.activations_flag = flags[_ACTIVATIONS_FLAG : _ACTIVATIONS_FLAG + 1]
        self.ids_flag = flags[_IDS_FLAG : _IDS_FLAG + 1]
        start = FLAG_BYTES
        ids = memory.tensor[start : start + room.ids_bytes].view(torch.int32)
        self.ids = ids.view(room.num_id_rows, room.max_samples)
        start += _aligned(room.ids_bytes)
        activations = memory.tensor[start : start + room.activation_bytes].view(room.dtype)
        self.activations = activations.view(
            room.max_steps_in_flight, 2, room.max_rows, room.hidden_size
        )

    def close(self) -> None:
        self._memory.close()


class DeviceStages:
    """This rank's place in a pipeline within a host; see `Stages`."""

    def __init__(
        self,
        shard: Shard,
        room: StageRoom,
        device: Device,
        own: _StageMemory,
        behind: _StageMemory,
        max_polls: int,
    ) -> None:
        """Takes its own memory, and that of the stage behind; of the last one, that is stage 0."""
        self.room = room
        self.is_first = shard.is_first_stage
        self.is_last = shard.is_last_stage
        self.is_leader = shard.part.rank == 0
        self.is_sampler = shard.is_last_stage and shard.part.tensor_rank == 0
        self._own = own
        self._behind = behind
        self._failed = device.zeros((1,), torch.int32)
        self._flags = [
            device.pinned((1,), torch.int32) for _ in range(room.max_steps_in_flight + 1)
        ]
        self._max_polls = max_polls

    @property
    def ids(self) -> Tensor:
        """What recent steps sampled, int32, on stage 0: `AwaitedIds` says where."""
        return self._own.ids.flatten()

    def enter(self, number: int, awaited: int | None, buffers: RowBuffers) -> None:
        """Lets the device wait for what a step needs; see `Stages`."""
        if not self.is_first:
            await_flag(self._own.activations_flag, number, self._failed, self._max_polls)
            residual, normed = self._place(self._own, number, buffers)
            buffers.residual_ME.copy_(residual, non_blocking=True)
            buffers.normed_ME.copy_(normed, non_blocking=True)
        elif awaited is not None:
            await_flag(self._own.ids_flag, awaited, self._failed, self._max_polls)

    def leave(self, number: int, buffers: RowBuffers) -> None:
        """Gives activations to the stage behind; not called on the last one."""
        residual, normed = self._place(self._behind, number, buffers)
        residual.copy_(buffers.residual_ME, non_blocking=True)
        normed.copy_(buffers.normed_ME, non_blocking=True)
        raise_flag(self._behind.activations_flag, number)

    def return_ids(self, number: int, ids: Tensor) -> None:
        """Gives what the last stage sampled to stage 0; the rows are those of the step."""
        row = self._behind.ids[number % self.room.num_id_rows]
        row[: ids.shape[0]].copy_(ids, non_blocking=True)
        raise_flag(self._behind.ids_flag, number)

    def expect_ids(self, number: int, num_rows: int) -> None:
        """Nothing to do: the last stage writes them here."""

    def watch(self, number: int) -> RankWatch:
        """Returns what says, once the stream got here, whether a stage was missed until here."""
        flag = self._flags[number % len(self._flags)]
        flag.copy_(self._failed, non_blocking=True)
        return RankWatch(flag)

    def close(self) -> None:
        """Gives the memory up; nothing may be in flight."""
        self._behind.close()
        self._own.close()

    def _place(
        self, memory: _StageMemory, number: int, buffers: RowBuffers
    ) -> tuple[Tensor, Tensor]:
        num_rows = buffers.residual_ME.shape[0]
        place = memory.activations[number % self.room.max_steps_in_flight]
        return place[0, :num_rows], place[1, :num_rows]


def connect_device_stages(
    exchange: RankExchange,
    shard: Shard,
    room: StageRoom,
    device: Device,
    kind: MemoryKind | None = None,
    max_polls: int = MAX_POLLS,
) -> DeviceStages:
    """Allocates this stage's memory and opens that of the one behind. Called by all ranks.

    They are in one host.

    Args:
        exchange: of all ranks.
        shard: of this rank; it speaks with those of the same number in other stages.
        room: what to allocate.
        device: of this rank.
        kind: how memory is shared; None: between GPUs.
        max_polls: how long a stage is waited for.
    """
    kind = kind or share_device_memory(device.torch_device)
    own, handle = kind.allocate(room.num_bytes)
    handles = exchange.exchange("stages", handle)
    rank, width = exchange.rank, shard.tensor_parallel
    behind = (rank + width) % (width * shard.num_stages)
    opened = kind.open(handles[behind], room.num_bytes)
    return DeviceStages(
        shard, room, device, _StageMemory(own, room), _StageMemory(opened, room), max_polls
    )


def count_hosts(exchange: RankExchange) -> int:
    """Returns over how many hosts the ranks are; called by all of them."""
    hosts: Sequence[bytes] = exchange.exchange("hosts", _BOOT_ID.read_bytes().strip())
    return len(set(hosts))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // FLAG_BYTES) * FLAG_BYTES
