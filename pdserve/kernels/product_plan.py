"""How a matrix product of few rows is cut up: plain data, chosen by `product_table`."""

from dataclasses import asdict, dataclass
from typing import Literal, Self, get_args

KernelName = Literal["streamed", "gated", "tiled", "row"]

MAX_ROW_KERNEL_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPlan:
    """One way to compute out[s, m, n] = sum over the s-th part of K of x[m, k] * weight[n, k].

    Rounding depends on `kernel`, `num_splits` and `block_k` (for the streamed kernel only through
    where a split begins); never on the number of rows.
    """

    kernel: KernelName
    """streamed: Hopper's copy engine and tensor cores; gated: the same over a weight of two halves,
    which writes silu of the upper half's outputs times the lower half's; tiled: tensor cores
    through plain Triton; row: fused multiply-adds for at most 8 rows."""
    num_splits: int
    """Parts of K that are summed apart, at least 1; the consumer adds them up in order."""
    block_n: int
    """Outputs of a tile, a power of two; 64 a warp group at least for the streamed kernel, 64 for
    the gated one, whose tile has so many of each half."""
    block_k: int
    """Inputs of a tile, a power of two."""
    num_stages: int
    """Tiles in flight, at least 1."""
    num_warps: int
    """Warps of a program: a power of two, for the streamed and the gated kernel 4 or 8."""
    programs_per_sm: int | None = None
    """Streamed only: this many persistent programs a multiprocessor share the tiles in turn.
    None: one program a tile."""

    def __post_init__(self) -> None:
        if self.kernel not in get_args(KernelName):
            raise ValueError(f"kernel must be one of {get_args(KernelName)}, got {self.kernel!r}")
        for name, value in (
            ("block_n", self.block_n),
            ("block_k", self.block_k),
            ("num_warps", self.num_warps),
        ):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.num_splits < 1 or self.num_stages < 1:
            raise ValueError(
                "num_splits and num_stages must be at least 1, "
                f"got {self.num_splits} and {self.num_stages}"
            )
        if self.programs_per_sm is not None and self.programs_per_sm < 1:
            raise ValueError(f"programs_per_sm must be at least 1, got {self.programs_per_sm}")
        if self.kernel == "gated" and (
            self.block_n < 64
            or self.num_warps not in (4, 8)
            or self.num_splits > 1
            or self.programs_per_sm is not None
        ):
            raise ValueError(
                "a gated plan needs 4 or 8 warps, 64 outputs a tile, one split and a program a "
                f"tile, got {self}"
            )
        if self.kernel == "streamed" and (self.block_n < 16 * self.num_warps or self.num_warps < 4):
            raise ValueError(
                "a streamed plan needs 4 or 8 warps and 16 outputs a warp, "
                f"got {self.num_warps} warps for block_n {self.block_n}"
            )

    def describe(self) -> str:
        """Returns a short name: kernel, block_n x block_k x stages, warps, splits, programs."""
        persistent = "" if self.programs_per_sm is None else f" p{self.programs_per_sm}"
        return (
            f"{self.kernel} {self.block_n}x{self.block_k}x{self.num_stages} "
            f"w{self.num_warps} S{self.num_splits}{persistent}"
        )

    def to_json(self) -> dict[str, str | int | None]:
        """Returns the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, str | int | None]) -> Self:
        """Returns the plan of `to_json`.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        try:
            return cls(**fields)  # type: ignore[arg-type]  # checked in __post_init__
        except TypeError as error:
            raise ValueError(f"not a product plan: {error}") from error


def pad_rows(num_rows: int, smallest: int, largest: int) -> int:
    """Returns the rows of a tile: the power of two that holds `num_rows`, within two bounds."""
    return min(max(1 << (num_rows - 1).bit_length(), smallest), largest)
