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


def test_many_keys_at_once_fill_the_table_well():
    keys = np.random.default_rng(1).integers(1, 1 << 64, 200_000, np.uint64)
    table = GranuleTable()
    for part in np.array_split(keys, 50):
        table.insert(part, (part & np.uint64(0xFFFF)).astype(np.uint32))
    is_found, slots = table.find(keys)
    assert is_found.all()
    assert (table.values_at(slots) == (keys & np.uint64(0xFFFF))).all()
    assert table.num_bytes / len(table) < 21


def test_keys_that_all_fall_into_one_segment_are_held_too():
    table = GranuleTable(5)
    keys = np.random.default_rng(2).integers(1, 1 << 64, 400_000, np.uint64)
    crowded = keys[table._segments_of(keys) == 7]
    table.insert(crowded, np.arange(len(crowded), dtype=np.uint32))
    _check(table, {int(key): value for value, key in enumerate(crowded)}, keys[:1] + np.uint64(1))


def test_segments_name_every_key_once():
    table = GranuleTable()
    keys = np.arange(1, 5001, dtype=np.uint64)
    table.insert(keys, keys.astype(np.uint32))
    slots = np.concatenate([table.slots_between(each, each + 1) for each in range(table.num_segments)])
    assert sorted(table.values_at(slots).tolist()) == keys.tolist()


def test_a_table_gets_longer_a_piece_at_a_time_and_ahead_of_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(granule_table, "_EXTENSION_BYTES", 1 << 16)
    table, rng = GranuleTable(), np.random.default_rng(4)
    added = []
    for _ in range(300):
        before = table.num_bytes
        keys = rng.integers(1, 1 << 63, 1000, np.uint64)
        table.insert(keys, keys.astype(np.uint32))
        added.append(table.num_bytes - before)
    # But for the first few, when the table is small, no call makes the arrays much longer.
    assert max(added[50:]) <= 1 << 17
    assert sum(added) == table.num_bytes - GranuleTable().num_bytes


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
