"""Which kernel computes each product of a model on the GPU at hand: chosen by measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.products import PlanChooser, shape_of
from pdserve.cuda.weights import ModelWeights
from pdserve.kernels.product_choices import ProductDevice
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import LayerShape, ProductTable
from pdserve.kernels.product_timer import make_product_table


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPlans:
    """What was chosen, and a line about it."""

    choose: PlanChooser
    summary: str


def choose_plans(
    weights: ModelWeights, device: Device, *, is_fixed: bool, cache: Path | None
) -> ProductPlans:
    """Chooses for every product of a model.

    Args:
        weights: what is multiplied; times are taken on them.
        device: theirs.
        is_fixed: takes one plan a product for any number of rows, so that no batch changes a bit.
        cache: folder where tables are kept from start to start; None measures anew.
    """
    by_shape = _weights_by_shape(weights)
    head = shape_of(weights.head_VE)
    if not device.is_cuda:
        return _choose_on_host(by_shape, head, is_fixed=is_fixed)
    if not is_fixed and weights.head_VE.dtype == torch.float32:
        return ProductPlans(choose=_library, summary="library")
    table = make_product_table(
        by_shape,
        head=head,
        use_pdl=device.has_dependent_launch,
        cache=cache,
        is_deterministic=is_fixed,
    )
    choices = [choice for rows in table.choices.values() for choice in rows.values()]
    num_own = sum(choice.plan is not None for choice in choices)
    summary = f"{num_own} of {len(choices)} by own kernels, the others by the library"
    if is_fixed:
        summary = "one plan a product"
    return ProductPlans(choose=_chooser(table, head), summary=summary)


def _choose_on_host(
    by_shape: Mapping[LayerShape, Sequence[Tensor]], head: LayerShape, *, is_fixed: bool
) -> ProductPlans:
    """Chooses where kernels are interpreted: nothing is timed there."""
    if not is_fixed:
        return ProductPlans(choose=_library, summary="library")
    tiny = ProductDevice(num_sms=4, has_streamed=False)
    fixed = {shape: tiny.fix_plan(shape) for shape in by_shape}
    table = ProductTable(device="cpu", choices={}, fixed=fixed)
    return ProductPlans(choose=_chooser(table, head), summary="one plan a product")


def _library(num_rows: int, shape: LayerShape) -> ProductPlan | None:
    """Chooses the library's product for all."""
    return None


def _chooser(table: ProductTable, head: LayerShape) -> PlanChooser:
    def choose(num_rows: int, shape: LayerShape) -> ProductPlan | None:
        plan = table.choose(shape, num_rows)
        if plan is not None and shape == head:
            # Logits are read as they are: nobody would add splits up.
            return replace(plan, num_splits=1)
        return plan

    return choose


def _weights_by_shape(weights: ModelWeights) -> Mapping[LayerShape, Sequence[Tensor]]:
    found: dict[LayerShape, list[Tensor]] = {}
    for layer in weights.layers:
        for weight in (layer.qkv_NE, layer.out_EN, layer.down_EN):
            found.setdefault(shape_of(weight), []).append(weight)
        gated = shape_of(layer.gate_up_NE, is_gated=layer.gate_up_bias_N is None)
        found.setdefault(gated, []).append(layer.gate_up_NE)
    if weights.head_VE.shape[0]:
        found.setdefault(shape_of(weights.head_VE), []).append(weights.head_VE)
    return found
