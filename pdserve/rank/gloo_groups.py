"""The Gloo groups of one replica's ranks: collectives of a stage, and the way between stages.

The ranks find each other in a `Meeting`: no server, no port. Every wait ends with the death of a
rank at the latest: its face, or what holds a stage on another node, then kills them all.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo, Work

from pdserve.config.shape import RankPart
from pdserve.layers.parallel import Arriving
from pdserve.rank.meeting import Meeting

STEP_TIMEOUT_S = 3600.0
"""Longer than any step: whether a rank is dead or frozen is seen elsewhere, and sooner."""
_ACTIVATIONS_TAG = 1
_LOGITS_TAG = 2
_NUM_TAGS = 64
"""Messages of one kind take turns among so many tags: more than are ever under way."""


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


@dataclass(slots=True)
class _Expected:
    """An `Arriving` of Gloo."""

    tensor: Tensor
    work: Work
    _is_here: bool = False
    """Gloo's work tells it only to whoever waits."""

    @property
    def is_here(self) -> bool:
        return self._is_here

    def wait(self) -> Tensor:
        if not self._is_here:
            self.work.wait()
            self._is_here = True
        return self.tensor


class _Turns:
    """Counts the messages of one kind; both ends count alike."""

    def __init__(self, tag: int) -> None:
        self._tag = tag
        self._count = 0

    def next_tag(self) -> int:
        self._count += 1
        return self._tag + 2 * (self._count % _NUM_TAGS)


class GlooStageLink:
    """A `StageLink` over Gloo: a tensor rank speaks with those of the same number.

    Gloo moves a message once its receiver asks for it, on a thread of its own. So a stage goes on
    to the next step, until as many of its messages as there are stages are under way.
    """

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
        self._max_sent = num_ranks // tensor_parallel
        self._sent: deque[Work] = deque()
        self._received_turns = _Turns(_ACTIVATIONS_TAG)
        self._sent_turns = _Turns(_ACTIVATIONS_TAG)
        self._logits_turns = _Turns(_LOGITS_TAG)

    def receive(self, num_rows: int, num_columns: int) -> Tensor:
        """Waits for the activations of the stage before."""
        x_MN = torch.empty(num_rows, num_columns, dtype=self._dtype)  # noqa: N806
        self._group.recv([x_MN], self._before, self._received_turns.next_tag()).wait()
        return x_MN

    def send(self, x_MN: Tensor) -> None:  # noqa: N803
        """Gives activations to the stage behind."""
        self._post(x_MN, self._behind, self._sent_turns.next_tag())

    def expect_logits(self, num_rows: int, num_columns: int) -> Arriving:
        """Returns, on rank 0, what the last stage will have computed."""
        logits = torch.empty(num_rows, num_columns)
        tag = self._logits_turns.next_tag()
        return _Expected(logits, self._group.recv([logits], self._last, tag))

    def send_logits(self, logits: Tensor) -> None:
        """Gives logits to rank 0."""
        self._post(logits, 0, self._logits_turns.next_tag())

    def _post(self, x: Tensor, peer: int, tag: int) -> None:
        while len(self._sent) >= self._max_sent:
            self._sent.popleft().wait()
        # The work keeps the tensor.
        self._sent.append(self._group.send([x.contiguous()], peer, tag))


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
