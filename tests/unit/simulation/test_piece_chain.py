import random

import pytest

from pdserve.cache.block_hash import HashChain
from simulation.piece_chain import PieceChain, PromptChains
from simulation.workload import Piece


def draw_pieces(numbers: random.Random, contents: int) -> list[Piece]:
    return [
        Piece(numbers.randrange(contents), numbers.randrange(1, 40))
        for _ in range(numbers.randrange(1, 8))
    ]


def expand(pieces: list[Piece]) -> list[int]:
    return [piece.content for piece in pieces for _ in range(piece.num_tokens)]


@pytest.mark.parametrize("seed", range(20))
def test_a_piece_chain_answers_like_a_chain_of_tokens(seed: int):
    numbers = random.Random(seed)
    pieces = draw_pieces(numbers, 4)
    ours, real = PieceChain(pieces, 8), HashChain(expand(pieces), 8, b"", "")
    for _ in range(12):
        token, count = numbers.randrange(4), numbers.randrange(0, 20)
        way = numbers.randrange(3)
        for chain in (ours, real):
            if way == 0:
                chain.append(token)
            elif way == 1:
                chain.extend([token] * count + [token + 1])
            else:
                chain.append_copies(token, count)
        assert len(ours) == len(real)
        assert ours.num_full_blocks == real.num_full_blocks
        assert ours.last == real.last
        start = numbers.randrange(len(real))
        assert ours.tokens(start, len(real)) == real.tokens(start, len(real))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_piece_chains_are_equal_where_their_tokens_are(seed: int):
    numbers = random.Random(seed)
    pieces = [draw_pieces(numbers, 2) for _ in range(12)]
    ours = [PieceChain(one, 8) for one in pieces]
    real = [HashChain(expand(one), 8, b"", "") for one in pieces]
    for mine, its in zip(ours, real, strict=True):
        for my_other, its_other in zip(ours, real, strict=True):
            for index in range(min(its.num_full_blocks, its_other.num_full_blocks)):
                is_equal = its.block_hash(index) == its_other.block_hash(index)
                assert (mine.block_hash(index) == my_other.block_hash(index)) == is_equal
                same_tokens = its.block_content(index) == its_other.block_content(index)
                assert (mine.block_content(index) == my_other.block_content(index)) == same_tokens


def test_a_fork_grows_by_itself():
    chain = PieceChain([Piece(1, 20)], 8)
    fork = chain.fork()
    fork.append_copies(2, 9)
    assert (len(chain), chain.num_full_blocks) == (20, 2)
    assert (len(fork), fork.num_full_blocks) == (29, 3)
    assert fork.block_hash(1) == chain.block_hash(1)


def test_granules_are_blocks_of_128_tokens_whatever_the_block_size():
    small, large = PieceChain([Piece(1, 300)], 16), PieceChain([Piece(1, 300)], 128)
    assert len(small.granules()) == len(large.granules()) == 2
    other = PieceChain([Piece(1, 200), Piece(2, 100)], 16)
    assert other.granules()[0] == small.granules()[0]
    assert other.granules()[1] != small.granules()[1]


def test_a_prompt_is_hashed_once_for_each_size_of_blocks():
    chains = PromptChains()
    pieces = (Piece(1, 200), Piece(2, 100))
    chain = chains.of(pieces, 128)
    assert chains.of((Piece(1, 200), Piece(2, 100)), 128) is chain
    assert chains.of(pieces, 64).num_full_blocks == 4
    assert chain.granules() == PieceChain(pieces, 128).granules()
