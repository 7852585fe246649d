from dataclasses import dataclass

import pytest
import torch

from pdserve.kernels.rotary_store import rotate_and_store

NUM_SLOTS = 50
UNTOUCHED = 77.0


@dataclass
class Case:
    """Inputs and outputs of one call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    q: torch.Tensor

    def launch(self, **options: object) -> None:
        rotate_and_store(
            self.qkv,
            self.positions,
            self.slots,
            self.cos,
            self.sin,
            self.keys,
            self.values,
            self.q,
            num_heads=self.num_heads,
            **options,  # type: ignore[arg-type]
        )

    def heads(self, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns query, key and value heads before anything is done to them, float64."""
        total = self.qkv.double().sum(0)
        if bias is not None:
            total += bias.double()
        shaped = total.view(total.shape[0], -1, self.head_dim)
        return shaped.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = (t[self.positions.long()].double()[:, None] for t in (self.cos, self.sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def case(
    num_rows: int = 5,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    num_splits: int = 2,
) -> Case:
    generator = torch.Generator().manual_seed(num_rows * head_dim)
    angles = torch.rand(30, head_dim // 2, generator=generator) * 6
    num_outputs = (heads[0] + 2 * heads[1]) * head_dim
    return Case(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        qkv=torch.randn(num_splits, num_rows, num_outputs, generator=generator),
        positions=torch.randint(30, (num_rows,), generator=generator).int(),
        slots=torch.randperm(NUM_SLOTS, generator=generator)[:num_rows].int(),
        cos=angles.cos(),
        sin=angles.sin(),
        keys=torch.full((NUM_SLOTS, heads[1], head_dim), UNTOUCHED),
        values=torch.full((NUM_SLOTS, heads[1], head_dim), UNTOUCHED),
        q=torch.full((num_rows, heads[0], head_dim), torch.nan),
    )


def check(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    slots = case.slots.long()
    for got, expected in ((case.q, q), (case.keys[slots], k), (case.values[slots], v)):
        torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (7, 1)])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_queries_and_keys_are_turned_and_kv_is_stored(
    num_rows: int, heads: tuple[int, int], head_dim: int
) -> None:
    this = case(num_rows, heads, head_dim)
    this.launch()
    q, k, v = this.heads()
    check(this, this.turned(q), this.turned(k), v)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_partial_sums_and_a_bias_are_added_first(num_splits: int) -> None:
    this = case(num_splits=num_splits)
    bias = torch.randn(this.qkv.shape[-1], generator=torch.Generator().manual_seed(3))
    this.launch(bias_N=bias)
    q, k, v = this.heads(bias)
    check(this, this.turned(q), this.turned(k), v)


def test_query_and_key_heads_are_normed_before_they_are_turned() -> None:
    this = case(num_rows=7, head_dim=24)
    q_gain, k_gain = torch.randn(2, 24, generator=torch.Generator().manual_seed(3))
    this.launch(q_gain_D=q_gain, k_gain_D=k_gain, epsilon=1e-3)
    q, k, v = this.heads()
    q, k = (
        x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gain.double()
        for x, gain in ((q, q_gain), (k, k_gain))
    )
    check(this, this.turned(q), this.turned(k), v)


def test_layers_without_positions_only_store() -> None:
    this = case()
    this.launch(is_rotated=False)
    check(this, *this.heads())


def test_rows_without_a_slot_store_nothing() -> None:
    this = case(num_rows=6)
    written = this.slots[::2].long()
    this.slots[1::2] = -1
    this.launch()
    is_written = torch.zeros(NUM_SLOTS, dtype=torch.bool)
    is_written[written] = True
    assert bool((this.keys[~is_written] == UNTOUCHED).all())
    assert bool((this.values[~is_written] == UNTOUCHED).all())
    assert not bool((this.keys[written] == UNTOUCHED).any())
    assert bool(this.q.isfinite().all())


def test_slots_may_lie_apart_in_memory() -> None:
    this = case()
    wide = torch.full((NUM_SLOTS, 3, 2, 2, 16), UNTOUCHED)
    this.keys, this.values = wide[:, 1, 0], wide[:, 1, 1]
    this.launch()
    q, k, v = this.heads()
    check(this, this.turned(q), this.turned(k), v)
    assert bool((wide[:, 0] == UNTOUCHED).all())
    assert bool((wide[:, 2] == UNTOUCHED).all())
