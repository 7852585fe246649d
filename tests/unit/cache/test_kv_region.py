import pytest

from pdserve.cache.kv_region import make_region
from pdserve.request import BlockId

TABLE = tuple(BlockId(block) for block in (7, 3, 9, 1))


@pytest.mark.parametrize(
    ("tokens", "block_ids", "offset"),
    [
        (range(0, 16), (7,), 0),
        (range(0, 17), (7, 3), 0),
        (range(20, 30), (3,), 4),
        (range(15, 33), (7, 3, 9), 15),
        (range(48, 64), (1,), 0),
    ],
)
def test_a_region_names_the_blocks_of_its_tokens(
    tokens: range, block_ids: tuple[int, ...], offset: int
) -> None:
    region = make_region(
        table=TABLE,
        block_size=16,
        tokens=tokens,
        layers=range(2),
        heads=range(1),
        dtype="float32",
    )
    assert (region.block_ids, region.offset, region.num_tokens) == (block_ids, offset, len(tokens))
