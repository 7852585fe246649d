from dataclasses import replace

import pytest

from pdserve.cuda.memory import MARGIN_BYTES, MemoryPicture, fit_blocks
from pdserve.errors import ConfigError

GIB = 1 << 30
PICTURE = MemoryPicture(
    total_bytes=100 * GIB,
    free_bytes=80 * GIB,
    own_bytes=20 * GIB,
    passing_bytes=GIB // 2,
    graph_bytes=GIB // 2,
    utilization=0.9,
)
BLOCK = 2 << 20


def fit(
    picture: MemoryPicture = PICTURE, *, bytes_: int | None = None, tokens: int | None = None
) -> int:
    return fit_blocks(
        picture, block_bytes=BLOCK, block_size=16, wished_bytes=bytes_, wished_tokens=tokens
    )


def test_kv_takes_the_allowed_share_less_what_is_taken_and_what_graphs_will_take() -> None:
    assert fit() == (90 - 20 - 1) * GIB // BLOCK


def test_what_links_may_take_later_is_kept_for_them() -> None:
    assert fit(replace(PICTURE, link_bytes=2 * GIB)) == (90 - 20 - 1 - 2) * GIB // BLOCK


def test_memory_that_another_process_holds_is_not_counted_on() -> None:
    picture = replace(PICTURE, free_bytes=30 * GIB)
    assert fit(picture) == (29 * GIB - MARGIN_BYTES) // BLOCK


def test_given_bytes_are_taken_as_they_are() -> None:
    assert fit(bytes_=10 * BLOCK + 1) == 10


def test_too_many_given_bytes_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(ConfigError, match=f"at most {69 * GIB} bytes.*got {70 * GIB}"):
        fit(bytes_=70 * GIB)


def test_a_longer_model_length_than_fits_is_refused_with_the_tokens_that_fit() -> None:
    tokens = fit() * 16
    assert fit(tokens=tokens) * 16 == tokens
    with pytest.raises(ConfigError, match=f"max_model_len must be at most {tokens}"):
        fit(tokens=tokens + 1)


@pytest.mark.parametrize("own", [89 * GIB, 95 * GIB])
def test_no_room_for_two_blocks_is_refused_with_what_is_taken(own: int) -> None:
    picture = replace(PICTURE, own_bytes=own, free_bytes=4 * GIB)
    with pytest.raises(ConfigError, match=r"at least 4194304 bytes.*0 are left"):
        fit(picture)
