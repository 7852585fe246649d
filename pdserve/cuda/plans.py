"""Which kernel computes each product of a model on the GPU at hand: chosen by measured times."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.products import PlanChooser
from pdserve.cuda.weights import ModelWeights
from pdserve.kernels.product_plan import KernelName, ProductPlan, pad_rows
from pdserve.kernels.product_table import ROW_BUCKETS, LayerShape, ProductTable, measure_table
from pdserve.kernels.product_timer import ProductTimer

MEASURED_BUCKETS = (1, 8, 32, 64, 128, 256)
READ_BYTES_PER_S = 3e12
"""Of partial sums, most of which are in the second-level cache."""
NUM_PROCESSORS = 132
RING_BYTES = 200 << 10
"""Shared memory that a streamed plan's stages may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPlans:
    """What was chosen, and a line about it."""

    choose: PlanChooser
    summary: str
    table: ProductTable | None = None


def choose_plans(weights: ModelWeights, device: Device, *, is_fixed: bool) -> ProductPlans:
    """Chooses for every product of a model.

    Args:
        weights: what is multiplied; times are taken on them.
        device: theirs.
        is_fixed: takes one plan a product for any number of rows, so that no batch changes a bit.
    """
    by_shape = _weights_by_shape(weights)
    head = _shape_of(weights.head_VE)
    is_half = weights.head_VE.dtype != torch.float32
    has_streams = device.has_dependent_launch and is_half
    name = f"{device.name} {weights.head_VE.dtype} torch {torch.__version__}"
    if is_fixed:
        kernel: KernelName = "streamed" if has_streams else "tiled"
        fixed = {
            shape: _fixed_plan(kernel, 1 if shape == head else _splits(shape, 128))
            for shape in by_shape
        }
        table = ProductTable(device=name, choices={}, fixed=fixed)
        return ProductPlans(
            choose=_chooser(table), summary=f"one {kernel} plan a product", table=table
        )
    if not device.is_cuda or not is_half:
        return ProductPlans(choose=_library, summary="library")
    timer = ProductTimer(
        by_shape, use_pdl=device.has_dependent_launch, read_bytes_per_s=READ_BYTES_PER_S
    )

    def list_plans(shape: LayerShape, num_rows: int) -> Iterable[ProductPlan]:
        return _candidates(shape, num_rows, has_streams=has_streams, may_split=shape != head)

    timer.compile(
        (shape, rows, plan)
        for shape in by_shape
        for rows in MEASURED_BUCKETS
        for plan in list_plans(shape, rows)
    )
    table = measure_table(name, tuple(by_shape), list_plans, timer, buckets=MEASURED_BUCKETS)
    num_own = sum(
        choice.plan is not None for rows in table.choices.values() for choice in rows.values()
    )
    num_all = len(table.choices) * len(ROW_BUCKETS)
    return ProductPlans(
        choose=_chooser(table),
        summary=f"{num_own} of {num_all} by own kernels, the others by the library",
        table=table,
    )


def _library(num_rows: int, num_outputs: int, num_inputs: int) -> ProductPlan | None:
    """Chooses the library's product for all."""
    return None


def _chooser(table: ProductTable) -> PlanChooser:
    def choose(num_rows: int, num_outputs: int, num_inputs: int) -> ProductPlan | None:
        return table.choose(LayerShape(num_outputs=num_outputs, num_inputs=num_inputs), num_rows)

    return choose


def _shape_of(weight: Tensor) -> LayerShape:
    return LayerShape(num_outputs=weight.shape[0], num_inputs=weight.shape[1])


def _weights_by_shape(weights: ModelWeights) -> Mapping[LayerShape, Sequence[Tensor]]:
    found: dict[LayerShape, list[Tensor]] = {}
    for layer in weights.layers:
        for weight in (layer.qkv_NE, layer.out_EN, layer.gate_up_NE, layer.down_EN):
            found.setdefault(_shape_of(weight), []).append(weight)
    found[_shape_of(weights.head_VE)] = [weights.head_VE]
    return found


def _splits(shape: LayerShape, block_n: int) -> int:
    """Returns the splits of K that give every processor a tile."""
    tiles = -(-shape.num_outputs // block_n)
    splits = 1
    while tiles * splits * 2 <= 2 * NUM_PROCESSORS and shape.num_inputs // (splits * 2) >= 512:
        splits *= 2
    return splits


def _candidates(
    shape: LayerShape, num_rows: int, *, has_streams: bool, may_split: bool
) -> Iterable[ProductPlan]:
    kernel: KernelName = "streamed" if has_streams else "tiled"
    block_m = pad_rows(num_rows, 8, 256)
    for block_n, block_k in ((64, 128), (128, 64), (128, 128)):
        stages = min(8, RING_BYTES // (2 * block_k * (block_n + block_m)))
        if stages < 2:
            continue
        natural = _splits(shape, block_n) if may_split else 1
        for splits in sorted({natural, max(1, natural // 2)}):
            yield ProductPlan(
                kernel=kernel,
                num_splits=splits,
                block_n=block_n,
                block_k=block_k,
                num_stages=stages if has_streams else min(stages, 4),
                num_warps=4,
            )


def _fixed_plan(kernel: KernelName, num_splits: int) -> ProductPlan:
    """Returns a plan that serves one row as well as thousands."""
    return ProductPlan(
        kernel=kernel,
        num_splits=num_splits,
        block_n=128 if kernel == "streamed" else 64,
        block_k=64,
        num_stages=4,
        num_warps=8 if kernel == "streamed" else 4,
    )
