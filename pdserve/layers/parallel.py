"""What the ranks of one replica exchange inside a step, and what a model is told of its part.

Products over all inputs of a row (attention's output and the feed-forward's) are joined in one of
two ways. `JoinExactly` gathers the inputs, and each rank computes some outputs over all of them:
every sum runs over the same numbers in the same order as on one rank, so float32 results are
bit-equal whatever the number of ranks. `JoinSums` adds the ranks' partial products: half the
exchanges, other roundings; for dtypes that promise no equal bits.

Letters: M rows (tokens) of the batch, N columns, H query heads, D head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from pdserve.config.model import ModelConfig
from pdserve.config.shape import RankPart, split_evenly
from pdserve.errors import ConfigError

VECTOR_VALUES = 32
"""float32 values that an element-wise kernel of torch takes at once, at most (AVX-512, two)."""


class TensorGroup(Protocol):
    """The tensor ranks of one stage. Every call is made by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This rank's place."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def gather(self, x_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Puts the ranks' columns side by side; `widths` says how many each has."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Adds the ranks' tensors, in the order of the ranks."""
        ...


class Arriving(Protocol):
    """A tensor that may still be on its way."""

    @property
    def is_here(self) -> bool:
        """Says whether `wait` would return at once."""
        ...

    def wait(self) -> Tensor:
        """Returns it once it is here; may be called again, but by one thread at a time."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """An `Arriving` that was here from the start."""

    tensor: Tensor

    @property
    def is_here(self) -> bool:
        """Says yes."""
        return True

    def wait(self) -> Tensor:
        """Returns it."""
        return self.tensor


class StageLink(Protocol):
    """The neighbours of a pipeline stage. Everything arrives in the order in which it was sent."""

    def receive(self, num_rows: int, num_columns: int) -> Tensor:
        """Waits for the activations of the stage before."""
        ...

    def send(self, x_MN: Tensor) -> None:
        """Gives activations to the stage behind; waits only if that is several steps behind."""
        ...

    def expect_logits(self, num_rows: int, num_columns: int) -> Arriving:
        """Returns, on rank 0, what the last stage will make of the activations sent last."""
        ...

    def send_logits(self, logits: Tensor) -> None:
        """Gives logits to rank 0, like `send`."""
        ...


class Join(Protocol):
    """Joins a product over all inputs whose inputs lie on several ranks."""

    def enter(self, x_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Prepares a rank's share of the inputs."""
        ...

    def leave(self, y_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Makes all outputs, on every rank, of what the ranks computed."""
        ...


class JoinNothing:
    """One rank has everything."""

    def enter(self, x_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns it."""
        return x_MN

    def leave(self, y_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns it."""
        return y_MN


class JoinExactly:
    """Gathers inputs, then outputs: no sum is split."""

    def __init__(self, group: TensorGroup) -> None:
        """Keeps the group."""
        self._group = group

    def enter(self, x_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Gathers the inputs."""
        return self._group.gather(x_MN, widths)

    def leave(self, y_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Gathers the outputs."""
        return self._group.gather(y_MN, widths)


class JoinSums:
    """Adds partial products."""

    def __init__(self, group: TensorGroup) -> None:
        """Keeps the group."""
        self._group = group

    def enter(self, x_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns it: each rank has the weights of its own inputs."""
        return x_MN

    def leave(self, y_MN: Tensor, widths: Sequence[int]) -> Tensor:
        """Adds what the ranks computed."""
        return self._group.sum(y_MN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's part of a model. `group` and `stages` are None where there is one of each."""

    whole: ModelConfig
    part: RankPart
    tensor_parallel: int
    num_stages: int
    is_exact: bool
    group: TensorGroup | None = None
    stages: StageLink | None = None

    @property
    def is_first_stage(self) -> bool:
        """True where token ids are embedded."""
        return self.part.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True where logits are computed."""
        return self.part.stage == self.num_stages - 1

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.whole.num_heads // self.tensor_parallel

    def __post_init__(self) -> None:
        """Checks that every rank gets a share of the feed-forward part.

        Raises:
            ConfigError: there are more ranks than vectors in it.
        """
        if self.whole.intermediate_size < VECTOR_VALUES * self.tensor_parallel > VECTOR_VALUES:
            raise ConfigError(
                f"tensor_parallel must be at most intermediate_size {self.whole.intermediate_size} "
                f"/ {VECTOR_VALUES}, got {self.tensor_parallel}",
                settings=("tensor_parallel",),
            )

    @property
    def inner_shares(self) -> tuple[range, ...]:
        """Columns of the feed-forward part on each rank: whole vectors, but for the last.

        A vector kernel may round its tail differently, and here the activation function is
        computed on the share.
        """
        count = self.whole.intermediate_size
        vectors = split_evenly(-(-count // VECTOR_VALUES), self.tensor_parallel)
        return tuple(
            range(share.start * VECTOR_VALUES, min(share.stop * VECTOR_VALUES, count))
            for share in vectors
        )

    @property
    def inner_share(self) -> range:
        """Columns of the feed-forward part on this rank."""
        return self.inner_shares[self.part.tensor_rank]

    def shares_of(self, count: int) -> tuple[range, ...]:
        """Returns every rank's share of something that is split evenly."""
        return split_evenly(count, self.tensor_parallel)

    def share_of(self, count: int) -> range:
        """Returns this rank's share of something that is split evenly."""
        return self.shares_of(count)[self.part.tensor_rank]

    def widths_of(self, count: int) -> tuple[int, ...]:
        """Returns the sizes of all shares of something that is split evenly."""
        return tuple(len(share) for share in self.shares_of(count))

    def make_join(self) -> Join:
        """Returns how products over all inputs are joined."""
        if self.group is None:
            return JoinNothing()
        return JoinExactly(self.group) if self.is_exact else JoinSums(self.group)

    def attend(self, q_MHD: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Attends with this rank's query heads.

        Where several ranks share a KV head, each has some of its query heads. Where bits must be
        equal, the others' places are filled with zeros, so that the product has one size whatever
        the number of ranks.
        """
        num_group = self.whole.num_heads // self.whole.num_kv_heads
        if not self.is_exact or self.num_heads >= num_group:
            return attend(q_MHD)
        first = self.part.tensor_rank * self.num_heads % num_group
        behind = num_group - first - self.num_heads
        padded_MHD = functional.pad(q_MHD, (0, 0, first, behind))
        return attend(padded_MHD)[:, first : first + self.num_heads]


def make_whole_shard(config: ModelConfig) -> Shard:
    """Returns the part of an only rank: everything."""
    part = RankPart(
        rank=0,
        stage=0,
        tensor_rank=0,
        layers=range(config.num_layers),
        kv_heads=range(config.num_kv_heads),
    )
    return Shard(whole=config, part=part, tensor_parallel=1, num_stages=1, is_exact=True)
