import torch

from pdserve.layers.rotary import RotaryEmbedding, rotate


def test_position_zero_leaves_heads_alone() -> None:
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    rotary = RotaryEmbedding(8, 10000.0, 4, torch.float32)
    assert torch.equal(rotate(x, rotary.at(torch.tensor([0]))), x)


def test_pairs_turn_by_position_times_frequency() -> None:
    rotary = RotaryEmbedding(4, 100.0, 64, torch.float32)
    x = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
    turned = rotate(x, rotary.at(torch.tensor([3])))
    angles = torch.tensor([3.0, 3.0 / 10])
    torch.testing.assert_close(turned[0, 0], torch.cat((angles.cos(), angles.sin())))


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 16, generator=generator)
    rotary = RotaryEmbedding(16, 10000.0, 512, torch.float32)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned_q = rotate(q, rotary.at(torch.tensor([query_position])))
        turned_k = rotate(k, rotary.at(torch.tensor([key_position])))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(10, 3), score(407, 400), atol=1e-4, rtol=1e-4)


def test_tables_of_different_lengths_agree_bit_for_bit() -> None:
    positions = torch.arange(65)
    short = RotaryEmbedding(10, 10000.0, 65, torch.float32).at(positions)
    long = RotaryEmbedding(10, 10000.0, 8192, torch.float32).at(positions)
    assert torch.equal(short.cos, long.cos)
    assert torch.equal(short.sin, long.sin)
