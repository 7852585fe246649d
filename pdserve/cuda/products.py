"""Matrix products of a step: which kernel computes each, and where its output goes.

Letters: M rows, N outputs, K inputs, S splits of the sum, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from pdserve.config.model import ModelConfig
from pdserve.cuda.workspace import Workspace
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import ROW_BUCKETS, LayerShape
from pdserve.kernels.silu_mul import silu_mul
from pdserve.kernels.small_product import small_product


class PlanChooser(Protocol):
    """Says how a product is computed; None is the library's way."""

    def __call__(self, num_rows: int, shape: LayerShape) -> ProductPlan | None:
        """Chooses for x [num_rows, num_inputs] and a weight [num_outputs, num_inputs]."""
        ...


def shape_of(weight_NK: Tensor, *, is_gated: bool = False) -> LayerShape:
    """Returns what plans are chosen by."""
    num_outputs, num_inputs = weight_NK.shape
    return LayerShape(num_outputs=num_outputs, num_inputs=num_inputs, is_gated=is_gated)


def max_product_bytes(
    config: ModelConfig, choose: PlanChooser, max_rows: int, dtype: torch.dtype
) -> int:
    """Returns the size of the largest output of a product but the head's."""
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = (
        LayerShape(num_outputs=heads + 2 * keys, num_inputs=hidden),
        LayerShape(num_outputs=hidden, num_inputs=heads),
        LayerShape(num_outputs=2 * inner, num_inputs=hidden, is_gated=not config.has_mlp_bias),
        LayerShape(num_outputs=hidden, num_inputs=inner),
    )
    largest = 0
    for shape in shapes:
        for num_rows in {*(rows for rows in ROW_BUCKETS if rows <= max_rows), max_rows}:
            plan = choose(num_rows, shape)
            item = dtype.itemsize
            if plan is not None and plan.num_splits > 1:
                item = plan.num_splits * torch.float32.itemsize
            largest = max(largest, num_rows * shape.num_outputs * item)
    return largest


class Products:
    """Computes x @ weight^T into the workspace."""

    def __init__(self, workspace: Workspace, choose: PlanChooser, *, use_pdl: bool) -> None:
        """Keeps them."""
        self._workspace = workspace
        self._choose = choose
        self._use_pdl = use_pdl

    def multiply(self, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Returns the product as sums [S, M, N] that the next kernel adds up.

        It is overwritten by the next product.
        """
        plan = self._choose(x_MK.shape[0], shape_of(weight_NK))
        out = self._multiply(x_MK, weight_NK, plan)
        if bias_N is not None:
            out[0].add_(bias_N)
        return out

    def multiply_gated(
        self, x_MK: Tensor, weight_NK: Tensor, out_MI: Tensor, bias_N: Tensor | None = None
    ) -> None:
        """Writes silu(gate) * up, of a weight whose first half is the gate's.

        A product that does all of it knows no bias.
        """
        plan = self._choose(x_MK.shape[0], shape_of(weight_NK, is_gated=bias_N is None))
        if plan is not None and plan.kernel == "gated":
            small_product(x_MK, weight_NK, out_MI.unsqueeze(0), plan, use_pdl=self._use_pdl)
            return
        gate_up = self._multiply(x_MK, weight_NK, plan)
        silu_mul(gate_up, out_MI, bias_N=bias_N, use_pdl=self._use_pdl)

    def _multiply(self, x_MK: Tensor, weight_NK: Tensor, plan: ProductPlan | None) -> Tensor:
        num_rows, num_outputs = x_MK.shape[0], weight_NK.shape[0]
        if plan is None:
            out = self._workspace.product((1, num_rows, num_outputs), self._workspace.dtype)
            torch.mm(x_MK, weight_NK.t(), out=out[0])
            return out
        dtype = self._workspace.dtype if plan.num_splits == 1 else torch.float32
        out = self._workspace.product((plan.num_splits, num_rows, num_outputs), dtype)
        small_product(x_MK, weight_NK, out, plan, use_pdl=self._use_pdl)
        return out

    def logits(self, x_MK: Tensor, head_VK: Tensor) -> Tensor:
        """Returns logits of the head's tokens, float32.

        A bfloat16 of 30 could not tell 0.2 apart.
        """
        num_rows = x_MK.shape[0]
        out = self._workspace.logits(num_rows)
        plan = self._choose(num_rows, shape_of(head_VK))
        if plan is not None:
            small_product(x_MK, head_VK, out.unsqueeze(0), plan, use_pdl=self._use_pdl)
        elif x_MK.dtype == torch.float32:
            torch.mm(x_MK, head_VK.t(), out=out)
        else:
            torch.mm(x_MK, head_VK.t(), out_dtype=torch.float32, out=out)
        return out
