"""Which plans are worth timing for a layer, and the one plan of deterministic mode."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from pdserve.kernels.product_plan import MAX_ROW_KERNEL_ROWS, ProductPlan
from pdserve.kernels.product_table import LayerShape, ProductTable, find_bucket

_Ring = tuple[int, int, int, int]
"""block_n, block_k, num_stages, num_warps."""
# By the largest number of rows they are tried for; the
# order is that of an H200's sweep (benchmarks/results/gpu_products.json).
_STREAMED_RINGS: tuple[tuple[int, tuple[_Ring, ...]], ...] = (
    (16, ((64, 256, 5, 4), (64, 128, 4, 4))),
    (32, ((64, 128, 8, 4), (64, 256, 4, 4))),
    (64, ((64, 128, 7, 4), (128, 128, 4, 4))),
    (128, ((64, 128, 4, 4), (128, 64, 6, 4), (256, 64, 4, 8))),
    (256, ((64, 64, 5, 4), (128, 64, 4, 8))),
)
_GATED_RINGS: tuple[tuple[int, tuple[_Ring, ...]], ...] = (
    (16, ((64, 256, 3, 4), (64, 128, 5, 4))),
    (32, ((64, 128, 2, 4), (64, 128, 5, 4))),
    (64, ((64, 128, 4, 4), (64, 128, 2, 4))),
    (128, ((64, 64, 3, 4), (128, 64, 4, 8))),
    (256, ((64, 64, 4, 8), (128, 64, 4, 8))),
)
_TILED_RINGS: tuple[_Ring, ...] = ((64, 128, 3, 4), (128, 64, 4, 4))
_MAX_SPLITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductDevice:
    """What the choice of plans has to know of a device and a model's dtype."""

    num_sms: int
    has_streamed: bool
    """True on Hopper for 16-bit floats."""

    def list_plans(self, shape: LayerShape, num_rows: int) -> Iterable[ProductPlan]:
        """Returns the plan measured before for this shape, or a few that may do."""
        known = load_defaults().choices.get(shape, {}) if self.has_streamed else {}
        if find_bucket(num_rows) in known:
            plan = known[find_bucket(num_rows)].plan
            return () if plan is None else (plan,)
        rings = _TILED_RINGS
        if self._can_stream(shape):
            rings = next(rings for max_rows, rings in _STREAMED_RINGS if num_rows <= max_rows)
        plans = [self._cut(shape, *ring) for ring in rings]
        if shape.is_gated and self._can_stream(shape):
            gated = next(rings for max_rows, rings in _GATED_RINGS if num_rows <= max_rows)
            plans += [_gate(*ring) for ring in gated]
        if num_rows <= min(4, MAX_ROW_KERNEL_ROWS):
            plans.append(
                ProductPlan(
                    kernel="row",
                    num_splits=1,
                    block_n=4,
                    block_k=1024,
                    num_stages=1,
                    num_warps=4,
                )
            )
        return plans

    def fix_plan(self, shape: LayerShape) -> ProductPlan:
        """Returns the plan of deterministic mode, which rounds alike for every number of rows."""
        if self._can_stream(shape):
            return _gate(64, 64, 4, 4) if shape.is_gated else self._cut(shape, 128, 64, 8, 4)
        return self._cut(shape, *_TILED_RINGS[0])

    def _can_stream(self, shape: LayerShape) -> bool:
        """Says whether the copy engine can address such weights."""
        return self.has_streamed and shape.num_inputs % 8 == 0

    def _cut(
        self, shape: LayerShape, block_n: int, block_k: int, num_stages: int, num_warps: int
    ) -> ProductPlan:
        """Splits K until most multiprocessors have a tile, while splits stay long."""
        num_tiles = -(-shape.num_outputs // block_n)
        num_k_blocks = -(-shape.num_inputs // block_k)
        num_splits = 1
        while (
            num_splits < _MAX_SPLITS
            and num_tiles * num_splits < 0.7 * self.num_sms
            and num_k_blocks // (2 * num_splits) >= 4
        ):
            num_splits *= 2
        return ProductPlan(
            kernel="streamed" if self._can_stream(shape) else "tiled",
            num_splits=num_splits,
            block_n=block_n,
            block_k=block_k,
            num_stages=num_stages,
            num_warps=num_warps,
        )


def _gate(block_n: int, block_k: int, num_stages: int, num_warps: int) -> ProductPlan:
    return ProductPlan(
        kernel="gated",
        num_splits=1,
        block_n=block_n,
        block_k=block_k,
        num_stages=num_stages,
        num_warps=num_warps,
    )


@cache
def load_defaults() -> ProductTable:
    """Returns the plans measured on an H200 for bfloat16, by shape and bucket of rows.

    A shape may lack the larger buckets.
    """
    text = resources.files("pdserve.kernels").joinpath("product_defaults.json").read_text()
    return ProductTable.from_json(json.loads(text))
