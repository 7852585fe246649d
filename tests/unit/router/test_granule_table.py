import numpy as np
import pytest

from router import granule_table
from router.granule_table import GranuleTable, Keys


def _check(table: GranuleTable, expected: dict[int, int], absent: Keys) -> None:
    keys = np.array(list(expected), np.uint64)
    is_found, slots = table.find(keys)
    assert is_found.all()
    assert table.values_at(slots).tolist() == list(expected.values())
    assert not table.find(absent)[0].any()
    assert len(table) == len(expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_grows_and_empties_holds_what_a_dict_holds(seed: int):
    rng = np.random.default_rng(seed)
    table, expected = GranuleTable(seed), {}
    absent = rng.integers(1 << 62, 1 << 63, 500, np.uint64)
    for turn in range(60):
        keys = np.unique(rng.integers(1, 20_000, 900, np.uint64))
        is_found, slots = table.find(keys)
        assert is_found.tolist() == [int(key) in expected for key in keys]
        if turn % 3 == 2:
            table.delete(slots[is_found])
            for key in keys[is_found].tolist():
                del expected[key]
        else:
            values = rng.integers(0, 1 << 32, len(keys), np.uint32)
            table.set_values(slots[is_found], values[is_found])
            table.insert(keys[~is_found], values[~is_found])
            expected.update(zip(keys.tolist(), values.tolist(), strict=True))
        _check(table, expected, absent)


def _fill(table: GranuleTable, keys: Keys, num_parts: int) -> None:
    for part in np.array_split(keys, num_parts):
        table.insert(part, (part & _LOW).astype(np.uint32))


def _random_keys(seed: int, count: int) -> Keys:
    return np.unique(np.random.default_rng(seed).integers(1, 1 << 64, count, np.uint64))


_LOW = np.uint64(0xFFFFFFFF)


def test_memory_of_a_key_is_the_same_at_every_size():
    table = GranuleTable()
    for part in np.array_split(_random_keys(1, 400_000), 200):
        table.insert(part, (part & _LOW).astype(np.uint32))
        assert len(table) < 10_000 or 16.5 < table.num_bytes / len(table) < 18
    is_found, slots = table.find(_random_keys(1, 400_000))
    assert is_found.all()
    assert (table.values_at(slots) == (_random_keys(1, 400_000) & _LOW)).all()


@pytest.mark.parametrize("fill", [0.85, 0.95])
def test_keys_that_find_no_room_push_others_on_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch, fill: float
) -> None:
    monkeypatch.setattr(granule_table, "_FILL", fill)
    monkeypatch.setattr(granule_table, "_MAX_KICKS", 20)
    table, keys = GranuleTable(2), _random_keys(2, 60_000)
    _fill(table, keys, 20)
    is_found, slots = table.find(keys)
    assert is_found.all()
    assert (table.values_at(slots) == (keys & _LOW)).all()
    assert len(np.unique(slots)) == len(keys)


def test_one_big_insertion_does_as_many_small_ones_do():
    keys = _random_keys(3, 100_000)
    once, often = GranuleTable(), GranuleTable()
    _fill(once, keys, 1)
    _fill(often, keys, 100)
    assert once.find(keys)[0].all()
    assert once._num_buckets == often._num_buckets


def test_no_call_splits_or_clears_more_than_a_multiple_of_its_own_keys() -> None:
    """However large the table is: that is what bounds the pause of the event loop."""
    table = GranuleTable()
    for part in np.array_split(_random_keys(4, 600_000), 300):
        before, bytes_before = table._num_buckets, table.num_bytes
        table.insert(part, np.zeros(len(part), np.uint32))
        num_split = table._num_buckets - before
        assert 8 * num_split <= 1.5 * len(part)
        cleared = table.num_bytes - bytes_before
        assert cleared <= 96 * (num_split + before // 64 + 1)


def test_a_walk_comes_to_every_key_that_is_there_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nearly full, so that keys that come push many others back and forth.
    monkeypatch.setattr(granule_table, "_FILL", 0.9)
    monkeypatch.setattr(granule_table, "_WALK_BUCKETS", 64)
    table, keys = GranuleTable(1), _random_keys(5, 40_000)
    random = np.random.default_rng(6)
    random.shuffle(keys)
    old, new = keys[:20_000], iter(np.array_split(keys[20_000:], 400))
    _fill(table, old, 10)
    for _ in range(2):
        seen: set[int] = set()
        num_back = 0
        is_last = False
        while not is_last:
            slots, is_last = table.walk()
            assert len(np.unique(slots)) == len(slots)
            there = table._keys.reshape(-1)[slots]
            assert there.all()
            num_back += len(seen & set(there.tolist()))
            seen |= set(there.tolist())
            assert len(slots) <= 64 * 8 + 2000
            for part in (next(new), next(new)):
                table.insert(part, np.zeros(len(part), np.uint32))
                table.delete(table.find(part[::2])[1])
        assert seen >= set(old.tolist())
        assert num_back > 0


def test_one_key_is_found_as_many_are():
    random = np.random.default_rng(11)
    table = GranuleTable(seed=9)
    there = np.unique(random.integers(1, 2**64, 9000, dtype=np.uint64))
    for part in np.array_split(there, 30):
        table.insert(part, np.zeros(len(part), np.uint32))
    asked = np.concatenate((there, random.integers(1, 2**64, 9000, dtype=np.uint64)))
    is_found, _ = table.find(asked)
    assert [table.has(key) for key in asked.tolist()] == is_found.tolist()
    assert is_found.sum() >= len(there)
