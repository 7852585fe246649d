import os
import subprocess
import sys
from array import array

import pytest

from pdserve.cache.block_hash import HashChain, hash_block, hash_blocks, hash_root

GOLDEN = (
    "5e80a430cc936f113ed9564b441ae8078409b29317ebe06802f915daaf4bd61b",
    "681a2831599e85c7d1838c4716726a0acc843c6c1acc40ba25cbd0dec7de83ef",
)


def test_A20_hashes_equal_the_golden_vectors():
    hashes = hash_blocks(range(10), 4, b"tenant", "revision")
    assert tuple(digest.hex() for digest in hashes) == GOLDEN


def test_A20_fresh_processes_agree_whatever_their_hash_seed():
    program = (
        "from pdserve.cache.block_hash import hash_blocks\n"
        "print(hash_blocks(range(10), 4, b'tenant', 'revision')[1].hex())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    ]
    assert outputs == [GOLDEN[1]] * 3


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_blocks: int):
    assert len(hash_blocks(range(num_tokens), 4, b"", "r")) == num_blocks


def test_a_block_is_named_after_all_that_comes_before_it():
    first = hash_blocks((1, 2, 3, 4), 2, b"", "r")
    second = hash_blocks((9, 2, 3, 4), 2, b"", "r")
    assert first[1] != second[1]


def test_tenants_and_revisions_share_no_hash():
    names = {hash_blocks((1, 2), 2, salt, rev)[0] for salt in (b"a", b"b") for rev in ("x", "y")}
    assert len(names) == 4


def test_bytes_cannot_move_from_one_field_to_the_next():
    assert hash_root(b"ab", "c") != hash_root(b"a", "bc")


def test_a_block_of_other_size_has_another_hash():
    root = hash_root(b"", "r")
    assert hash_block(root, (0,)) != hash_block(root, (0, 0))


@pytest.mark.parametrize("first", range(11))
def test_a_chain_grown_in_pieces_equals_one_made_at_once(first: int):
    chain = HashChain(range(first), 4, b"s", "r")
    for token in range(first, 11):
        chain.extend((token,))
    hashes = tuple(chain.block_hash(index) for index in range(chain.num_full_blocks))
    assert hashes == hash_blocks(range(11), 4, b"s", "r")
    assert (len(chain), chain.block_content(1), chain.tokens(8, 11)) == (
        11,
        array("I", (4, 5, 6, 7)).tobytes(),
        (8, 9, 10),
    )


def test_a_chain_that_grows_token_by_token_names_blocks_alike():
    chain = HashChain((), 4, b"tenant", "revision")
    for token in range(10):
        chain.append(token)
        assert chain.last == token
    hashes = [chain.block_hash(index).hex() for index in range(chain.num_full_blocks)]
    assert (len(chain), tuple(hashes)) == (10, GOLDEN)
