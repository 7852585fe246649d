"""The plans that the product benchmark compares for a shape."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdserve.kernels.product_plan import ProductPlan, pad_rows
from pdserve.kernels.product_table import LayerShape

MAX_RING_BYTES = 224 * 1024
NUM_SMS = 132


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One linear layer."""

    name: str
    num_outputs: int
    num_inputs: int

    @property
    def layer(self) -> LayerShape:
        """What the product table calls it."""
        return LayerShape(
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            is_gated=self.name == "gate_up",
        )

    def floor_us(self, num_rows: int, bytes_per_s: float, flops_per_s: float) -> float:
        """Returns the larger of the times for the weights' bytes and for the arithmetic."""
        num_weights = self.num_outputs * self.num_inputs
        return 1e6 * max(2 * num_weights / bytes_per_s, 2 * num_rows * num_weights / flops_per_s)


LLAMA_8B = (
    Shape(name="qkv", num_outputs=6144, num_inputs=4096),
    Shape(name="o", num_outputs=4096, num_inputs=4096),
    Shape(name="gate_up", num_outputs=28672, num_inputs=4096),
    Shape(name="down", num_outputs=4096, num_inputs=14336),
    Shape(name="lm_head", num_outputs=128256, num_inputs=4096),
)


def share_shapes(num_ranks: int) -> tuple[Shape, ...]:
    """Returns the layers as one of so many tensor ranks has them."""
    return tuple(
        replace(shape, num_inputs=shape.num_inputs // num_ranks)
        if shape.name in ("o", "down")
        else replace(shape, num_outputs=shape.num_outputs // num_ranks)
        for shape in LLAMA_8B
    )


# block_n, block_k, num_stages, num_warps
_RINGS = (
    (64, 128, 8, 4),
    (64, 128, 6, 4),
    (64, 128, 4, 4),
    (64, 128, 3, 4),
    (64, 64, 8, 4),
    (64, 64, 5, 4),
    (64, 256, 5, 4),
    (64, 256, 4, 4),
    (128, 64, 8, 4),
    (128, 64, 6, 4),
    (128, 64, 4, 4),
    (128, 128, 5, 4),
    (128, 64, 5, 8),
)


def describe(plan: ProductPlan | None) -> str:
    """Returns a short name of a plan; None is torch's product."""
    return "torch" if plan is None else plan.describe().replace(" ", "").replace("streamed", "s")


def list_candidates(shape: Shape, num_rows: int, *, streamed: bool) -> Iterator[ProductPlan]:
    """Yields the plans worth timing; the portable kernels get a few."""
    if streamed:
        yield from _list_streamed(shape, num_rows)
    if num_rows == 1:
        for block_n, block_k, num_warps in ((4, 1024, 4), (8, 512, 4)):
            for num_splits in _list_splits(shape, block_n, block_k, 500, 3000):
                yield ProductPlan(
                    kernel="row",
                    num_splits=num_splits,
                    block_n=block_n,
                    block_k=block_k,
                    num_stages=1,
                    num_warps=num_warps,
                )
    if num_rows == 64:
        for block_n, block_k, num_stages in ((64, 128, 4), (128, 64, 5)):
            for num_splits in _list_splits(shape, block_n, block_k, 64, 400):
                yield ProductPlan(
                    kernel="tiled",
                    num_splits=num_splits,
                    block_n=block_n,
                    block_k=block_k,
                    num_stages=num_stages,
                    num_warps=4,
                )


def _list_splits(
    shape: Shape, block_n: int, block_k: int, min_units: int, max_units: int
) -> list[int]:
    num_tiles = -(-shape.num_outputs // block_n)
    num_k_blocks = -(-shape.num_inputs // block_k)
    splits = [
        splits
        for splits in (1, 2, 4, 8)
        if min_units <= num_tiles * splits <= max_units and num_k_blocks // splits >= 4
    ]
    return splits or [1]


def _list_streamed(shape: Shape, num_rows: int) -> Iterator[ProductPlan]:
    block_m = pad_rows(num_rows, 8, 256)
    seen = set()
    for block_n, block_k, max_stages, num_warps in _RINGS:
        if block_n * block_m > 128 * 32 * num_warps or (num_warps == 8 and block_m < 64):
            continue
        stage_bytes = 2 * block_k * (block_n + block_m)
        num_stages = min(max_stages, MAX_RING_BYTES // stage_bytes)
        if num_stages < 2 or (block_n, block_k, num_stages, num_warps) in seen:
            continue
        seen.add((block_n, block_k, num_stages, num_warps))
        per_sm = max(1, 227 * 1024 // (num_stages * stage_bytes + 2048))
        for num_splits in _list_splits(shape, block_n, block_k, 64, 400):
            num_units = -(-shape.num_outputs // block_n) * num_splits
            choices: tuple[int | None, ...] = (None,)
            if num_units > per_sm * NUM_SMS:
                choices = (None, per_sm)
            for programs_per_sm in choices:
                yield ProductPlan(
                    kernel="streamed",
                    num_splits=num_splits,
                    block_n=block_n,
                    block_k=block_k,
                    num_stages=num_stages,
                    num_warps=num_warps,
                    programs_per_sm=programs_per_sm,
                )
