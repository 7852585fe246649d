import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdserve.errors import ConfigError
from pdserve.layers import linear as linear_module
from pdserve.layers.linear import Linear, LinearBackend, check_cuts, choose_backend, self_test

SHAPES = [(128, 64), (64, 64), (72, 200), (384, 72), (1536, 576)]
PLAIN = LinearBackend(is_packed=False)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_bit_equal_whatever_the_number_of_rows(shape: tuple[int, int]) -> None:
    weight, bias, rows_in = random(*shape), random(shape[0]), random(300, shape[1])
    linear = Linear(weight, bias, choose_backend(torch.float32, [shape]))
    expected = linear(rows_in)
    for rows in (*range(1, 70), 100, 127, 128, 129, 255, 256, 257):
        assert torch.equal(linear(rows_in[:rows]), expected[:rows]), f"{rows} rows"
    for start in (1, 5, 63, 64, 200):
        assert torch.equal(linear(rows_in[start : start + 3]), expected[start : start + 3])


@pytest.mark.parametrize("backend", [PLAIN, LinearBackend(is_packed=True)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_torch(backend: LinearBackend, has_bias: bool) -> None:
    weight, rows_in = random(96, 64), random(10, 64)
    bias = random(96) if has_bias else None
    expected = functional.linear(rows_in, weight, bias)
    torch.testing.assert_close(Linear(weight, bias, backend)(rows_in), expected)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 70])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scratch_values", [64, 200, 1 << 16])
def test_a_weight_widened_part_by_part_gives_the_product(
    num_rows: int, has_bias: bool, scratch_values: int
) -> None:
    weight, rows_in = random(96, 64).bfloat16(), random(num_rows, 64).bfloat16()
    bias = random(96).bfloat16() if has_bias else None
    backend = LinearBackend(is_packed=False, scratch=torch.empty(scratch_values))
    found = Linear(weight, bias, backend)(rows_in)
    expected = functional.linear(
        rows_in.float(), weight.float(), None if bias is None else bias.float()
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.02)


def test_bfloat16_is_widened_only_where_it_cannot_be_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "_can_pack", lambda _: True)
    assert choose_backend(torch.bfloat16, [(8, 8)]).scratch is None
    monkeypatch.setattr(linear_module, "_can_pack", lambda _: False)
    scratch = choose_backend(torch.bfloat16, [(8, 1 << 20)]).scratch
    assert scratch is not None
    assert scratch.numel() == 1 << 20


def test_few_rows_are_padded_and_cut_again() -> None:
    weight, rows_in = random(96, 64), random(3, 64)
    padded = Linear(weight, None, LinearBackend(is_packed=False, min_rows=16))
    assert padded(rows_in).shape == (3, 96)
    torch.testing.assert_close(padded(rows_in), rows_in @ weight.T)


class RowCountSensitive:
    """A product that adds the number of rows: as wrong as can be."""

    def __call__(self, rows_in: torch.Tensor) -> torch.Tensor:
        return rows_in + rows_in.shape[0]


def test_the_self_test_finds_a_product_that_depends_on_the_number_of_rows() -> None:
    sensitive = RowCountSensitive()
    assert not self_test(sensitive, 64, 8, torch.float32)  # type: ignore[arg-type]  # a stand-in


def test_float32_is_refused_where_no_product_is_independent_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "self_test", lambda *_: False)
    with pytest.raises(ConfigError, match="use dtype bfloat16"):
        choose_backend(torch.float32, [(8, 8)])
    choose_backend(torch.bfloat16, [(8, 8)])


def test_rows_are_padded_where_only_larger_products_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def agrees_from_8_rows(linear: Linear, *_: object) -> bool:
        return linear._backend.min_rows >= 8

    monkeypatch.setattr(linear_module, "self_test", agrees_from_8_rows)
    assert choose_backend(torch.float32, [(8, 8)]).min_rows == 8


def test_plain_products_take_over_where_weights_cannot_be_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(linear_module, "pack_weight", refuse)
    backend = choose_backend(torch.float32, SHAPES[:2])
    assert not backend.is_packed
    weight, rows_in = random(128, 64), random(64, 64)
    linear = Linear(weight, None, backend)
    assert torch.equal(linear(rows_in[:1]), linear(rows_in)[:1])


def test_A15_a_share_of_the_outputs_is_computed_as_with_all_the_others() -> None:
    backend = choose_backend(torch.float32, [(96, 64), (48, 64)])
    check_cuts(torch.float32, [(96, 48, 64), (391, 98, 64)], backend)


def test_a_cpu_on_which_the_number_of_outputs_matters_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = Linear.__call__

    def rounding_by_width(self: Linear, x: Tensor) -> Tensor:
        y = exact(self, x)
        return y * (1 + y.shape[1] * 1e-5)

    monkeypatch.setattr(Linear, "__call__", rounding_by_width)
    with pytest.raises(ConfigError, match=r"tensor_parallel: .* \(48 of 96\)"):
        check_cuts(torch.float32, [(96, 48, 64)], LinearBackend(is_packed=False))
