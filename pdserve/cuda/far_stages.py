"""The stages of a pipeline of GPUs on several hosts: what `stages` writes into memory goes by wire.

    stage 0       await ids -> embed, layers -> send activations; receive ids, ahead of time
    stage 1 ...   receive activations, ahead of time -> layers -> send ...
    last stage    ... -> layers, head, sampling -> send ids to stage 0

Transfers run beside the engine's stream, one ring of places at either end of a wire. A place at the
sender is written again when it was sent, one at the receiver when the engine's stream has read it.
Nothing bounds the wait for a stage that is gone but its face, which ends all ranks of the replica.

Letters: M rows, E hidden.
"""

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.stages import StageRoom
from pdserve.cuda.tensor_ranks import RankWatch
from pdserve.cuda.wires import Mark, Wire
from pdserve.cuda.workspace import RowBuffers
from pdserve.layers.parallel import Shard


class FarStages:
    """This rank's place in a pipeline; see `stages.Stages`."""

    def __init__(
        self, shard: Shard, room: StageRoom, device: Device, behind: Wire, before: Wire
    ) -> None:
        """Takes its ends of two wires; the last stage is before the first.

        Args:
            shard: of this rank.
            room: what to allocate.
            device: that computes.
            behind: sends activations, or on the last stage ids.
            before: receives activations, or on the first stage ids.
        """
        self.room = room
        self.is_first = shard.is_first_stage
        self.is_last = shard.is_last_stage
        self.is_leader = shard.part.rank == 0
        self.is_sampler = shard.is_last_stage and shard.part.tensor_rank == 0
        self._device = device
        self._behind = behind
        self._before = before
        num_places = room.max_steps_in_flight
        shape = (num_places, 2 * room.max_rows * room.hidden_size)
        empty = (num_places, 0)
        self._outgoing = device.zeros(empty if self.is_last else shape, room.dtype)
        self._incoming = device.zeros(empty if self.is_first else shape, room.dtype)
        self._ids = device.zeros((room.num_id_rows, room.max_samples), torch.int32)
        self._sent: list[Mark] = [None] * num_places
        self._read: list[Mark] = [None] * num_places
        self._ids_moved: list[Mark] = [None] * room.num_id_rows
        """Received by the first stage, or sent by the last."""
        self._fine = torch.zeros(1, dtype=torch.int32)

    @property
    def ids(self) -> Tensor:
        """What recent steps sampled, int32, on stage 0: `AwaitedIds` says where."""
        return self._ids.flatten()

    def enter(self, number: int, awaited: int | None, buffers: RowBuffers) -> None:
        """Lets the device wait for what a step needs; see `stages.Stages`."""
        if self.is_first:
            if awaited is not None:
                self._wait(self._ids_moved[awaited % self.room.num_id_rows])
            return
        place = number % self.room.max_steps_in_flight
        here = _view(self._incoming[place], buffers)
        self._wait(self._before.receive(here, self._read[place]))
        buffers.residual_ME.copy_(here[0], non_blocking=True)
        buffers.normed_ME.copy_(here[1], non_blocking=True)
        self._read[place] = self._mark()

    def leave(self, number: int, buffers: RowBuffers) -> None:
        """Gives activations to the stage behind; not called on the last one."""
        place = number % self.room.max_steps_in_flight
        self._wait(self._sent[place])
        here = _view(self._outgoing[place], buffers)
        here[0].copy_(buffers.residual_ME, non_blocking=True)
        here[1].copy_(buffers.normed_ME, non_blocking=True)
        self._sent[place] = self._behind.send(here)

    def return_ids(self, number: int, ids: Tensor) -> None:
        """Gives what the last stage sampled to stage 0; the rows are those of the step."""
        row = number % self.room.num_id_rows
        self._wait(self._ids_moved[row])
        here = self._ids[row, : ids.shape[0]]
        here.copy_(ids, non_blocking=True)
        self._ids_moved[row] = self._behind.send(here)

    def expect_ids(self, number: int, num_rows: int) -> None:
        """Receives on stage 0 what the last one will sample in as many rows."""
        row = number % self.room.num_id_rows
        # Whoever read the row has ended: see `StageRoom.num_id_rows`.
        self._ids_moved[row] = self._before.receive(self._ids[row, :num_rows], None)

    def watch(self, number: int) -> RankWatch:
        """Finds no fault: a stage that is gone is not noticed on the device."""
        return RankWatch(self._fine)

    def close(self) -> None:
        """Gives the wires up, and ends what is under way on them."""
        self._behind.close()
        self._before.close()

    def _mark(self) -> Mark:
        return torch.cuda.current_stream().record_event() if self._device.is_cuda else None

    def _wait(self, mark: Mark) -> None:
        """Lets the engine's stream wait."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


def _view(place: Tensor, buffers: RowBuffers) -> Tensor:
    """Returns residual and norm of a step's rows, contiguous, [2, M, E]."""
    num_rows, width = buffers.residual_ME.shape
    return place[: 2 * num_rows * width].view(2, num_rows, width)
