"""The Gloo groups of one replica's ranks: collectives of a stage, and the way between stages.

The ranks find each other in a `Meeting`: no server, no port. Every wait ends with the death of a
rank at the latest: its face, or what holds a stage on another node, then kills them all.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo, Work

from pdserve.config.shape import RankPart
from pdserve.rank.meeting import Meeting

STEP_TIMEOUT_S = 3600.0
"""Longer than any step: whether a rank is dead or frozen is seen elsewhere, and sooner."""
_ACTIVATIONS_TAG = 1
_LOGITS_TAG = 2


class _Group(Protocol):
    """What torch's stubs leave out of a process group."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


class GlooTensorGroup:
    """A `TensorGroup` over Gloo."""

    def __init__(self, group: _Group, rank: int, size: int) -> None:
        """Takes a connected group."""
        self.rank = rank
        self.size = size
        self._group = group

    def gather(self, x_MN: Tensor, widths: Sequence[int]) -> Tensor:  # noqa: N803
        """Puts the ranks' columns side by side."""
        assert x_MN.shape[1] == widths[self.rank]
        missing = max(widths) - widths[self.rank]
        mine = torch.nn.functional.pad(x_MN, (0, missing)) if missing else x_MN
        parts = self._exchange(mine)
        pieces = zip(parts, widths, strict=True)
        return torch.cat([part[:, :width] for part, width in pieces], dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """Adds the ranks' tensors one after the other, so that every rank gets the same bits."""
        first, *others = self._exchange(x)
        for other in others:
            first += other
        return first

    def _exchange(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts


class GlooStageLink:
    """A `StageLink` over Gloo: a tensor rank speaks with those of the same number."""

    def __init__(
        self,
        group: _Group,
        part: RankPart,
        tensor_parallel: int,
        num_ranks: int,
        dtype: torch.dtype,
    ) -> None:
        """Takes a connected group of all ranks."""
        self._group = group
        self._before = part.rank - tensor_parallel
        self._behind = part.rank + tensor_parallel
        self._last = num_ranks - tensor_parallel
        self._dtype = dtype

    def receive(self, num_rows: int, num_columns: int) -> Tensor:
        """Waits for the activations of the stage before."""
        x_MN = torch.empty(num_rows, num_columns, dtype=self._dtype)  # noqa: N806
        self._group.recv([x_MN], self._before, _ACTIVATIONS_TAG).wait()
        return x_MN

    def send(self, x_MN: Tensor) -> None:  # noqa: N803
        """Gives activations to the stage behind."""
        self._group.send([x_MN.contiguous()], self._behind, _ACTIVATIONS_TAG).wait()

    def receive_logits(self, num_rows: int, num_columns: int) -> Tensor:
        """Waits, on rank 0, for what the last stage computed."""
        logits = torch.empty(num_rows, num_columns)
        self._group.recv([logits], self._last, _LOGITS_TAG).wait()
        return logits

    def send_logits(self, logits: Tensor) -> None:
        """Gives logits to rank 0."""
        self._group.send([logits.contiguous()], 0, _LOGITS_TAG).wait()


def connect_tensor_group(
    meeting: Meeting, part: RankPart, tensor_parallel: int, host: str
) -> GlooTensorGroup | None:
    """Connects the tensor ranks of a stage; None where there is only one."""
    if tensor_parallel == 1:
        return None
    store = meeting.store(f"stage-{part.stage}", tensor_parallel)
    group = _make_group(store, part.tensor_rank, tensor_parallel, host)
    return GlooTensorGroup(group, part.tensor_rank, tensor_parallel)


def connect_stages(
    meeting: Meeting,
    part: RankPart,
    tensor_parallel: int,
    num_stages: int,
    dtype: torch.dtype,
    host: str,
) -> GlooStageLink | None:
    """Connects all ranks of the replica; None where there is only one stage."""
    if num_stages == 1:
        return None
    num_ranks = tensor_parallel * num_stages
    store = meeting.store("all", num_ranks)
    group = _make_group(store, part.rank, num_ranks, host)
    return GlooStageLink(group, part, tensor_parallel, num_ranks, dtype)


def _make_group(store: Store, rank: int, size: int, host: str) -> _Group:
    # torch's stubs know neither these options nor the constructor that takes them.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return cast(_Group, ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options))
