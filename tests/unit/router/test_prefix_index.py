"""The index against plain sets, and what placements alone tell it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.request import WorkerId
from pdserve.timeline import ManualClock
from router import granule_table
from router.prefix_index import HINT_S, PrefixIndex

A, B, C = (WorkerId(name) for name in "abc")


def _tell(index: PrefixIndex, worker_id: WorkerId, *keys: int, removed: bool = False) -> None:
    array = np.array(keys, np.uint64)
    index.apply([worker_id], [array], [np.full(len(array), removed)])


def _expected(held: dict[WorkerId, set[int]], keys: list[int]) -> dict[WorkerId, int]:
    lengths = {}
    for worker_id, has in held.items():
        length = next((i for i, key in enumerate(keys) if key not in has), len(keys))
        if length:
            lengths[worker_id] = length
    return lengths


_IDS = st.sampled_from([WorkerId(f"w{i}") for i in range(30)])
_KEYS = st.lists(st.integers(0, 12), min_size=1, max_size=8)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "store", "remove", "forget", "snapshot"]), _IDS, _KEYS),
    max_size=60,
)


@settings(max_examples=50)
@given(_STEPS)
def test_the_index_answers_as_sets_would(steps):
    index = PrefixIndex(seed=3)
    held: dict[WorkerId, set[int]] = {}
    for what, worker_id, keys in steps:
        # 0 and 1 are one key to the index.
        keys = [key + 1 for key in keys]
        if what == "forget":
            index.forget(worker_id)
            held.pop(worker_id, None)
        elif what == "snapshot" or worker_id not in held:
            index.begin_snapshot(worker_id)
            held[worker_id] = set()
        elif what == "store":
            _tell(index, worker_id, *keys)
            held[worker_id] |= set(keys)
        else:
            _tell(index, worker_id, *keys, removed=True)
            held[worker_id] -= set(keys)
        query = list(range(keys[0], 14))
        assert index.match(query) == _expected(held, query)
    for first in range(1, 14):
        query = list(range(first, 14))
        assert index.match(query) == _expected(held, query)
    while index.sweep():
        pass
    assert len(index) == sum(map(len, held.values()))


@pytest.mark.parametrize("num_workers", [1, 2, 5, 17, 40, 1100])
def test_sets_of_any_size_are_kept_and_taken_apart_again(num_workers: int):
    index = PrefixIndex()
    workers = [WorkerId(f"w{i}") for i in range(num_workers)]
    for worker_id in workers:
        index.begin_snapshot(worker_id)
        _tell(index, worker_id, 7, 8, 9)
    for number, worker_id in enumerate(workers):
        _tell(index, worker_id, *([8, 9] if number % 2 else [9]), removed=True)
    assert index.match([7, 8, 9]) == {w: 1 if i % 2 else 2 for i, w in enumerate(workers)}
    for worker_id in workers:
        _tell(index, worker_id, 7, 8, 9, removed=True)
    assert (index.match([7]), len(index)) == ({}, 0)


def test_events_of_many_workers_in_one_batch_count_in_each_one_s_order():
    index = PrefixIndex()
    for worker_id in (A, B):
        index.begin_snapshot(worker_id)
    keys = [np.array(each, np.uint64) for each in ([1, 2, 2], [2, 1, 1, 1], [3])]
    removed = [
        np.array(each) for each in ([False, False, True], [False, False, True, False], [False])
    ]
    index.apply([A, B, A], keys, removed)
    assert index.match([1, 2, 3]) == {A: 1, B: 2}
    assert index.match([3]) == {A: 1}


def test_a_worker_has_the_row_that_its_caller_gave_it_for_all_its_snapshots():
    index = PrefixIndex()
    index.join(A, 12)
    for _ in range(3):
        index.begin_snapshot(A)
        _tell(index, A, 1, 2)
    rows, lengths = index.match_rows([1, 2, 3])
    assert (rows.tolist(), lengths.tolist()) == ([12], [2])
    assert [index.join(each) for each in (B, C, A)] == [0, 1, 12]
    index.forget(A)
    assert index.match_rows([1])[0].tolist() == []


def test_what_was_just_placed_counts_until_it_is_too_old():
    clock = ManualClock()
    index = PrefixIndex(clock=clock)
    index.begin_snapshot(A)
    index.add(A, [1, 2, 3])
    clock.advance(HINT_S - 1)
    assert index.match([1, 2, 3]) == {A: 3}
    clock.advance(1)
    assert index.match([1, 2, 3]) == {}
    assert len(index) == 0


def test_a_hint_that_the_worker_confirmed_stays_until_the_worker_takes_it_back():
    clock = ManualClock()
    index = PrefixIndex(clock=clock)
    index.begin_snapshot(A)
    index.add(A, [1, 2, 3])
    _tell(index, A, 1, 2)
    clock.advance(HINT_S)
    assert index.match([1, 2, 3]) == {A: 2}
    _tell(index, A, 2, removed=True)
    assert index.match([1, 2, 3]) == {A: 1}


def test_placing_again_what_a_worker_holds_makes_no_hint_that_outlives_its_eviction():
    index = PrefixIndex(clock=ManualClock())
    index.begin_snapshot(A)
    _tell(index, A, 1, 2)
    index.add(A, [1, 2, 3])
    _tell(index, A, 2, 1, removed=True)
    assert index.match([1, 2, 3]) == {}


def test_a_hint_given_again_ages_from_then_on():
    clock = ManualClock()
    index = PrefixIndex(clock=clock)
    index.begin_snapshot(A)
    index.add(A, [1, 2])
    clock.advance(HINT_S / 2)
    index.add(A, [1])
    clock.advance(HINT_S / 2)
    assert index.match([1, 2]) == {A: 1}


def test_an_unwatched_worker_is_known_from_placements_which_do_not_age():
    clock = ManualClock()
    index = PrefixIndex(clock=clock)
    index.add(A, [1, 2])
    clock.advance(100 * HINT_S)
    assert index.match([1, 2]) == {A: 2}
    _tell(index, A, 1, removed=True)
    assert index.match([1, 2]) == {A: 2}
    index.begin_snapshot(A)
    assert index.match([1, 2]) == {}


def test_hints_of_a_hot_prefix_are_tidied_up():
    index = PrefixIndex()
    for _ in range(3000):
        index.add(A, [1, 2, 3])
    assert index._hints.num_queued < 5000
    assert index.match([1, 2, 3]) == {A: 3}


def test_a_place_is_used_again_once_it_is_swept():
    index = PrefixIndex()
    for _ in range(50):
        index.begin_snapshot(A)
        _tell(index, A, 1, 2)
        while index.sweep():
            pass
    assert index._num_places <= 3
    assert len(index) == 2


def test_a_worker_that_left_is_swept_out_while_others_push_its_entries_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(granule_table, "_FILL", 0.9)
    monkeypatch.setattr(granule_table, "_WALK_BUCKETS", 64)
    index = PrefixIndex()
    for worker_id in (A, B, C):
        index.begin_snapshot(worker_id)
    keys = np.unique(np.random.default_rng(1).integers(2, 1 << 63, 40_000, np.uint64))
    np.random.default_rng(2).shuffle(keys)
    old, new = keys[:20_000], keys[20_000:].tolist()
    _tell(index, A, *old.tolist())
    _tell(index, B, *old[::2].tolist())
    index.forget(A)
    num_turns = 0
    while index.sweep():
        _tell(index, C, *new[num_turns * 40 : num_turns * 40 + 40])
        num_turns += 1
    num_new = min(num_turns * 40, len(new))
    assert len(index) == 10_000 + num_new
    # Its place goes to the next one, who has nothing yet.
    place = index._num_places
    index.begin_snapshot(A)
    assert index._num_places == place
    assert index.match([int(old[1])]) == {}


def test_no_turn_takes_more_than_a_part_of_what_a_worker_had_when_it_left():
    index = PrefixIndex()
    for worker_id in (A, B):
        index.begin_snapshot(worker_id)
    keys = np.random.default_rng(1).integers(2, 1 << 63, 300_000, np.uint64)
    for part in np.array_split(keys, 50):
        index.apply([A, B], [part, part[:10]], [np.zeros(len(part), np.bool_)] * 2)
    index.forget(A)
    counts = [len(index)]
    while index.sweep():
        counts.append(len(index))
    assert (counts[0], counts[-1]) == (300_500, 500)
    assert max(before - after for before, after in pairwise(counts)) <= 1 << 15


@pytest.mark.parametrize("size", [60, 200])
@pytest.mark.parametrize("seed", range(12))
def test_lengths_are_right_whatever_sets_follow_one_another(seed: int, size: int):
    """Sets of all sizes, closed under prefixes and not."""
    random = np.random.default_rng(seed)
    index = PrefixIndex(seed=seed)
    keys = np.arange(1, size + 1, dtype=np.uint64)
    held: dict[WorkerId, set[int]] = {}
    num_workers = int(random.choice([3, 16, 40, 150]))
    ends = random.integers(1, size + 1, num_workers)
    for number, end in enumerate(np.sort(ends) if seed % 2 else ends):
        has = keys[:end]
        if seed % 3 == 0:
            has = has[random.random(len(has)) < 0.8]
        if seed % 3 == 1:
            # A hole in the sets of most, so that lists stand between maps.
            has = np.delete(has, [7]) if number > 2 and len(has) > 7 else has
        worker_id = WorkerId(f"w{number}")
        index.begin_snapshot(worker_id)
        _tell(index, worker_id, *has.tolist())
        held[worker_id] = set(has.tolist())
    for first in (1, 2, 8, 9, 40):
        query = list(range(first, size + 2))
        assert index.match(query) == _expected(held, query)


@pytest.mark.parametrize("num_whole", [0, 20])
def test_a_granule_that_half_of_many_lack_ends_what_those_hold(num_whole: int):
    index = PrefixIndex()
    keys = list(range(1, 201))
    held: dict[WorkerId, set[int]] = {}
    for number in range(40):
        worker_id = WorkerId(f"w{number}")
        has = [key for key in keys if number < num_whole or key != 2 + number % 2]
        index.begin_snapshot(worker_id)
        _tell(index, worker_id, *has)
        held[worker_id] = set(has)
    assert index.match(keys) == _expected(held, keys)


_PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
_LIFE = st.lists(
    st.tuples(st.sampled_from(["place", "place", "store", "evict", "wait"]), _IDS, _PROMPTS),
    max_size=60,
)


@settings(max_examples=100)
@given(_LIFE)
def test_C12_placements_and_events_together_answer_as_sets_would(steps):
    """Keys name whole prefixes, as in service, and workers hold what is closed under prefixes."""
    clock = ManualClock()
    index = PrefixIndex(clock=clock, seed=5)
    told: dict[WorkerId, set[int]] = {}
    hinted: dict[WorkerId, dict[int, float]] = {}
    for what, worker_id, words in steps:
        keys = [hash((7, *words[: end + 1])) % 2**64 for end in range(len(words))]
        if worker_id not in told:
            index.begin_snapshot(worker_id)
            told[worker_id], hinted[worker_id] = set(), {}
        has, hints = told[worker_id], hinted[worker_id]
        if what == "place":
            index.match(keys)
            index.add(worker_id, keys)
            hints |= dict.fromkeys(set(keys) - has, clock.now() + HINT_S)
        elif what == "store":
            _tell(index, worker_id, *keys)
            has |= set(keys)
            for key in keys:
                hints.pop(key, None)
        elif what == "evict":
            gone = {key for key in has if key not in keys}
            if gone:
                _tell(index, worker_id, *gone, removed=True)
            has -= gone
        else:
            clock.advance(HINT_S * 0.4)
        for each in hinted.values():
            for key in [key for key, until_s in each.items() if until_s <= clock.now()]:
                del each[key]
        held = {each: told[each] | set(hinted[each]) for each in told}
        assert index.match(keys) == _expected(held, keys)
    assert len(index) == sum(len(told[each] | set(hinted[each])) for each in told)
