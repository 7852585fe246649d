from dataclasses import replace

import pytest

from pdserve.errors import NoWorker, Overloaded, TooLong
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from router.admission import Admission
from router.load_book import LoadBook
from router.policy import Demand, WorkerKey, WorkerView, choose_decode, choose_pair
from router.prefix_index import GRANULE_TOKENS, PrefixIndex, hash_granules


def _key(name: str) -> WorkerKey:
    return WorkerKey(worker_id=WorkerId(name), incarnation=Incarnation(1))


def _view(name: str, load: int = 0, **over: object) -> WorkerView:
    fields: dict[str, object] = {
        "key": _key(name),
        "role": Role.PREFILL if name.startswith("p") else Role.DECODE,
        "is_available": True,
        "compatibility_digest": b"x",
        "load_blocks": load,
        "total_blocks": 1000,
        "last_picked": 0,
    }
    return WorkerView(**{**fields, **over})


def _demand(prompt: int = 10, growth: int = 2, **cached: int) -> Demand:
    return Demand(
        prompt_blocks=prompt,
        growth_blocks=growth,
        cached_blocks={WorkerId(name): count for name, count in cached.items()},
    )


@pytest.mark.parametrize(
    ("loads", "cached", "expected"),
    [
        ({"p0": 5, "p1": 4, "d0": 0, "d1": 1}, {}, ("p1", "d0")),
        ({"p0": 5, "p1": 0, "d0": 0, "d1": 0}, {"p0": 8}, ("p0", "d0")),
        ({"p0": 9, "p1": 0, "d0": 0, "d1": 0}, {"p0": 8}, ("p1", "d0")),
        ({"p0": 0, "p1": 0, "d0": 3, "d1": 0}, {"d0": 10}, ("p0", "d0")),
    ],
)
def test_affinity_counts_as_much_as_the_queue_in_front_of_it(loads, cached, expected):
    workers = [_view(name, load) for name, load in loads.items()]
    choice = choose_pair(workers, _demand(**cached), has_prefill_pool=True)
    assert (choice.prefill.worker_id, choice.decode.worker_id) == expected
    assert choice.path == "disaggregated"


def test_of_equal_workers_the_one_picked_longest_ago_is_next():
    workers = [_view("p0", last_picked=2), _view("p1", last_picked=1), _view("d0")]
    choice = choose_pair(workers, _demand(), has_prefill_pool=True)
    assert choice.prefill.worker_id == "p1"


def test_C11_an_unavailable_worker_is_never_chosen_for_its_prefix():
    workers = [_view("p0", is_available=False), _view("p1", 500), _view("d0")]
    choice = choose_pair(workers, _demand(p0=10), has_prefill_pool=True)
    assert choice.prefill.worker_id == "p1"


def test_A17_only_workers_of_one_geometry_are_paired():
    workers = [
        _view("p0", 50, compatibility_digest=b"a"),
        _view("p1", 0, compatibility_digest=b"b"),
        _view("d0", 50, compatibility_digest=b"a"),
    ]
    choice = choose_pair(workers, _demand(), has_prefill_pool=True)
    assert (choice.prefill.worker_id, choice.decode.worker_id) == ("p0", "d0")


@pytest.mark.parametrize(
    ("workers", "has_prefill_pool", "message"),
    [
        ([], False, "decode"),
        (["p0"], True, "decode"),
        (["d0"], True, "prefill"),
    ],
)
def test_a_missing_pool_is_named(workers, has_prefill_pool, message):
    views = [_view(name) for name in workers]
    with pytest.raises(NoWorker, match=message):
        choose_pair(views, _demand(), has_prefill_pool=has_prefill_pool)


def test_without_a_prefill_pool_the_path_is_local():
    choice = choose_pair([_view("d0", 3), _view("d1")], _demand(), has_prefill_pool=False)
    assert (choice.prefill, choice.decode.worker_id, choice.path) == (None, "d1", "local")


def test_a_request_larger_than_every_cache_is_too_long():
    with pytest.raises(TooLong, match="1000 KV blocks"):
        choose_pair([_view("d0")], _demand(990, 11), has_prefill_pool=False)


def test_excluded_workers_are_passed_over():
    workers = [_view("d0"), _view("d1", 9), _view("d2", 5, compatibility_digest=b"other")]
    assert choose_decode(workers, _demand(), b"x", {_key("d0")}).worker_id == "d1"
    with pytest.raises(NoWorker):
        choose_decode(workers, _demand(), b"x", {_key("d0"), _key("d1")})


def test_the_longest_common_prefix_is_matched_per_worker():
    index = PrefixIndex()
    tokens = list(range(5 * GRANULE_TOKENS))
    keys = hash_granules(tokens)
    assert len(keys) == 5
    index.add(WorkerId("a"), keys[:3])
    index.add(WorkerId("b"), keys)
    assert index.match(keys) == {"a": 3, "b": 5}
    assert index.match(hash_granules(tokens[: GRANULE_TOKENS + 5])) == {"a": 1, "b": 1}
    assert index.match(hash_granules([1, *tokens])) == {}


def test_a_granule_behind_another_prefix_is_another_key():
    same = [7] * GRANULE_TOKENS
    one = hash_granules([1] * GRANULE_TOKENS + same)
    two = hash_granules([2] * GRANULE_TOKENS + same)
    assert one[1] != two[1]


def test_E7_tenants_never_share_keys():
    tokens = [7] * GRANULE_TOKENS
    assert hash_granules(tokens, b"a") != hash_granules(tokens, b"b")


def test_A20_granule_keys_are_the_same_in_every_process():
    assert hash_granules(range(2 * GRANULE_TOKENS), b"salt") == GOLDEN


GOLDEN = (1_477_864_662_402_796_230, 15_918_164_129_993_006_045)


def test_the_index_is_bounded_and_keeps_beginnings_longest():
    index = PrefixIndex(max_keys=4)
    old, new = hash_granules([1] * 512), hash_granules([2] * 384)
    index.add(WorkerId("a"), old)
    index.add(WorkerId("a"), new)
    assert len(index) == 4
    assert index.match(new) == {"a": 3}
    assert index.match(old) == {"a": 1}


def test_a_dead_worker_is_forgotten():
    index = PrefixIndex()
    keys = hash_granules([1] * 256)
    index.add(WorkerId("a"), keys)
    index.add(WorkerId("b"), keys[:1])
    index.forget(WorkerId("a"))
    assert index.match(keys) == {"b": 1}
    index.forget(WorkerId("b"))
    while index.sweep():
        pass
    assert len(index) == 0


def test_load_is_counted_from_dispatch_to_release():
    book = LoadBook()
    request = RequestId("r")
    book.charge(request, _key("p0"), 5)
    book.charge(request, _key("d0"), 7)
    book.charge(RequestId("s"), _key("d0"), 1)
    assert (book.blocks_of(_key("p0")), book.blocks_of(_key("d0"))) == (5, 8)
    assert book.last_pick_of(_key("d0")) > book.last_pick_of(_key("p0")) > 0
    book.charge(request, _key("d0"), 4)
    assert book.blocks_of(_key("d0")) == 5
    book.keep_only(request, (_key("d0"),))
    assert (book.blocks_of(_key("p0")), book.blocks_of(_key("d0"))) == (0, 5)
    book.keep_only(request, ())
    book.keep_only(request, ())
    book.keep_only(RequestId("s"), ())
    assert book.blocks_of(_key("d0")) == 0


def test_admission_bounds_what_waits_and_what_is_in_flight():
    admission = Admission(max_queued=2, max_in_flight=3)
    admission.admit()
    admission.admit()
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        admission.admit()
    admission.start()
    admission.admit()
    admission.start()
    with pytest.raises(Overloaded, match="3 requests are in flight") as caught:
        admission.admit()
    assert 0 < caught.value.retry_after_s <= 30
    admission.wait_again()
    admission.leave(is_waiting=True, service_s=1.0)
    admission.leave(is_waiting=True, service_s=1.0)
    admission.leave(is_waiting=False, service_s=1.0)
    assert (admission.num_in_flight, admission.num_waiting) == (0, 0)


def test_the_retry_hint_follows_how_fast_places_become_free():
    admission = Admission(max_queued=100, max_in_flight=100)
    for _ in range(50):
        admission.admit()
        admission.start()
        admission.leave(is_waiting=False, service_s=20.0)
    admission.admit()
    slow_s = admission.retry_after_s
    for _ in range(9):
        admission.admit()
    assert 10 * admission.retry_after_s == pytest.approx(slow_s)


@pytest.mark.parametrize(
    ("limit", "cached", "decode"),
    [
        (0, {"d1": 10}, None),
        (3, {"d1": 6}, None),
        (3, {"d1": 7}, "d1"),
        (3, {"d0": 8, "d1": 9}, "d0"),
        (10, {}, "d0"),
    ],
)
def test_a_prompt_with_a_short_uncached_rest_is_prefilled_where_it_is_cached(
    limit: int, cached: dict[str, int], decode: str | None
) -> None:
    workers = [_view("p0"), _view("d0"), _view("d1", load=5)]
    demand = replace(_demand(**cached), max_local_blocks=limit)
    choice = choose_pair(workers, demand, has_prefill_pool=True)
    assert (choice.path == "local") == (decode is not None)
    if decode is not None:
        assert (choice.prefill, choice.decode.worker_id) == (None, decode)
