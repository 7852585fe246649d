"""Which product computes what, and where the choice is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pdserve.cuda import plans
from pdserve.cuda.device import Device
from pdserve.cuda.plans import choose_plans
from pdserve.cuda.weights import ModelWeights
from pdserve.kernels.product_table import LayerShape, ProductTable, measure_table
from tests.support.cuda_engine import make_cuda_runner
from tests.unit.cuda.test_engine import settings


@dataclass
class Call:
    """What the table was asked for with."""

    cache: Path | None
    is_deterministic: bool


def weights_of(folder: Path, dtype: torch.dtype) -> ModelWeights:
    runner = make_cuda_runner(folder, settings(folder), 2)
    weights = runner.model._weights
    weights.head_VE.data = weights.head_VE.to(dtype)
    return weights


@pytest.mark.parametrize("is_fixed", [False, True])
def test_tables_of_a_gpu_are_kept_in_the_folder_that_is_given(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fixed: bool
) -> None:
    calls: list[Call] = []

    def make_table(
        weights: Mapping[LayerShape, object],
        *,
        head: LayerShape,
        use_pdl: bool,
        cache: Path | None,
        is_deterministic: bool,
    ) -> ProductTable:
        assert head in weights
        calls.append(Call(cache=cache, is_deterministic=is_deterministic))
        return measure_table("fake", list(weights), lambda *_: (), lambda *_: 1.0)

    monkeypatch.setattr(plans, "make_product_table", make_table)
    device = Device(torch.device("cpu"))
    device.is_cuda = True
    weights = weights_of(tiny_llama_folder, torch.bfloat16)
    choose_plans(weights, device, is_fixed=is_fixed, cache=tmp_path)
    assert calls == [Call(cache=tmp_path, is_deterministic=is_fixed)]
