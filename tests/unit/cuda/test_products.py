"""Products of a step: what is split comes as float32 sums, the rest in the model's dtype."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from pdserve.config.model import ModelConfig
from pdserve.cuda.products import Products, max_product_bytes
from pdserve.cuda.workspace import Workspace
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import LayerShape


class Room:
    """Stands for the workspace."""

    dtype = torch.float16

    def product(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns new memory."""
        return torch.full(shape, torch.nan, dtype=dtype)


def make_plan(num_splits: int) -> ProductPlan:
    return ProductPlan(
        kernel="tiled", num_splits=num_splits, block_n=16, block_k=32, num_stages=1, num_warps=4
    )


@pytest.mark.parametrize(
    ("num_splits", "dtype"), [(1, torch.float16), (2, torch.float32), (None, torch.float16)]
)
def test_only_sums_that_are_still_to_be_added_take_four_bytes(
    num_splits: int | None, dtype: torch.dtype
) -> None:
    plan = None if num_splits is None else make_plan(num_splits)
    products = Products(cast(Workspace, Room()), lambda *_: plan, use_pdl=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 64, generator=generator).half()
    weight = torch.randn(32, 64, generator=generator).half()
    out = products.multiply(x, weight)
    assert out.dtype == dtype
    assert tuple(out.shape) == (num_splits or 1, 3, 32)
    expected = x.double() @ weight.double().T
    assert ((out.double().sum(0) - expected).norm() / expected.norm()).item() < 1e-3


@pytest.mark.parametrize("num_splits", [1, 2, None])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_is_silu_of_its_first_half_times_the_second(
    num_splits: int | None, has_bias: bool
) -> None:
    plan = None if num_splits is None else make_plan(num_splits)
    asked: list[LayerShape] = []

    def choose(num_rows: int, shape: LayerShape) -> ProductPlan | None:
        asked.append(shape)
        return plan

    products = Products(cast(Workspace, Room()), choose, use_pdl=False)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 64, generator=generator).half()
    weight = (torch.randn(32, 64, generator=generator) / 8).half()
    bias = torch.randn(32, generator=generator).half() if has_bias else None
    out = torch.full((3, 16), torch.nan).half()
    products.multiply_gated(x, weight, out, bias)
    sums = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = sums.chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    assert ((out.double() - expected).norm() / expected.norm()).item() < 2e-3
    # what computes all of it in one kernel adds no bias
    assert asked == [LayerShape(num_outputs=32, num_inputs=64, is_gated=not has_bias)]


def test_room_is_kept_for_the_largest_product_as_it_comes() -> None:
    config = cast(
        ModelConfig,
        SimpleNamespace(
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            hidden_size=32,
            intermediate_size=64,
            has_mlp_bias=False,
        ),
    )

    def choose(num_rows: int, shape: LayerShape) -> ProductPlan | None:
        return make_plan(4) if shape.num_outputs == 32 else make_plan(1)

    # 32 outputs in four sums of four bytes are more than 128 outputs of two
    assert max_product_bytes(config, choose, 8, torch.float16) == 8 * 32 * 4 * 4
