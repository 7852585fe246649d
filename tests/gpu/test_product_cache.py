"""A second start on the same device measures no product."""

from pathlib import Path

import pytest
import torch

from pdserve.kernels import product_timer
from pdserve.kernels.product_table import LayerShape, ProductTable
from pdserve.kernels.product_timer import make_product_table


def test_a_table_is_measured_once_and_read_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = LayerShape(num_outputs=320, num_inputs=256)
    weights = {shape: [torch.randn(320, 256, device="cuda", dtype=torch.bfloat16)]}
    use_pdl = torch.cuda.get_device_capability() >= (9, 0)

    def make() -> ProductTable:
        return make_product_table(weights, use_pdl=use_pdl, cache=tmp_path, is_deterministic=False)

    measured = make()
    assert len(list(tmp_path.iterdir())) == 1

    def refuse(*arguments: object, **settings: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(product_timer, "ProductTimer", refuse)
    assert make() == measured
    with pytest.raises(AssertionError, match="timed again"):
        make_product_table(weights, use_pdl=not use_pdl, cache=tmp_path, is_deterministic=False)
