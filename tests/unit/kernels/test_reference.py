import pytest
import torch

from pdserve.kernels.reference import attend_row, attend_tile, gather_blocks, make_tile_mask

TILE = 64


def plain_attention(
    query: torch.Tensor, all_keys: torch.Tensor, all_values: torch.Tensor
) -> torch.Tensor:
    """Attends from one query to all keys, head by head, in float64."""
    group = query.shape[0] // all_keys.shape[1]
    keys = all_keys.double().repeat_interleave(group, dim=1)
    values = all_values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,shd->hs", query.double(), keys) / query.shape[1] ** 0.5
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values).float()


def tensors(
    num_tokens: int, num_kv: int, heads: tuple[int, int] = (6, 2), head_dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens + 1000 * num_kv)
    q = torch.randn(num_tokens, heads[0], head_dim, generator=generator)
    keys, values = torch.randn(2, num_kv, heads[1], head_dim, generator=generator)
    return q, keys, values


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
@pytest.mark.parametrize(("first", "last"), [(0, 64), (0, 1), (63, 64), (10, 47)])
def test_a_tile_attends_to_its_past_alone(
    heads: tuple[int, int], head_dim: int, first: int, last: int
) -> None:
    num_kv = 3 * TILE
    q, keys, values = tensors(last - first, num_kv, heads, head_dim)
    out = attend_tile(q, keys, values, first, make_tile_mask(num_kv, torch.float32))
    for row in range(last - first):
        seen = 2 * TILE + first + row + 1
        expected = plain_attention(q[row], keys[:seen], values[:seen])
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_kv", [64, 128, 640])
def test_part_of_a_tile_is_bit_equal_to_the_whole(num_kv: int) -> None:
    q, keys, values = tensors(TILE, num_kv)
    mask = make_tile_mask(1024, torch.float32)[:, -num_kv:]
    whole = attend_tile(q, keys, values, 0, mask)
    for first, last in ((0, 1), (0, 16), (16, 37), (37, 64), (63, 64)):
        part = attend_tile(q[first:last], keys, values, first, mask)
        assert torch.equal(part, whole[first:last])


def test_what_lies_behind_the_mask_changes_no_bit() -> None:
    q, keys, values = tensors(20, 2 * TILE)
    mask = make_tile_mask(2 * TILE, torch.float32)
    expected = attend_tile(q, keys, values, 0, mask)
    keys[TILE + 20 :], values[TILE + 20 :] = 1e30, -1e30
    assert torch.equal(attend_tile(q, keys, values, 0, mask), expected)


@pytest.mark.parametrize("num_kv", [1, 15, 64, 65, 700])
def test_a_row_attends_to_all_of_its_kv(num_kv: int) -> None:
    q, keys, values = tensors(1, num_kv)
    out = attend_row(q.view(1, 2, 3, 16), keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    expected = plain_attention(q[0], keys, values)
    torch.testing.assert_close(out.view(6, 16), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_kv", [1, 17, 64, 300])
def test_a_row_is_bit_equal_over_a_view_and_over_a_copy(num_kv: int) -> None:
    q, keys, values = tensors(1, 512)
    q = q.view(1, 2, 3, 16)
    expected = attend_row(
        q, keys[5:][:num_kv].transpose(0, 1)[None], values[5:][:num_kv].transpose(0, 1)[None]
    )
    copied = [part[5:][:num_kv].clone().transpose(0, 1)[None] for part in (keys, values)]
    assert torch.equal(attend_row(q, *copied), expected)


def test_gathered_blocks_come_in_the_order_of_the_table() -> None:
    slots = torch.arange(12.0).view(12, 1, 1)
    out = gather_blocks(slots, torch.tensor([2, 0, 2]), block_size=4)
    assert out.flatten().tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11]


def test_the_mask_of_a_shorter_kv_is_the_end_of_a_longer_one() -> None:
    assert torch.equal(
        make_tile_mask(640, torch.float32)[:, -128:], make_tile_mask(128, torch.float32)
    )
