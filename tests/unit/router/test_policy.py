import numpy as np
import pytest

from pdserve.errors import NoWorker, Overloaded, TooLong
from pdserve.predictor.predictor import Predictor
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.admission import Admission
from router.cost import LawTable
from router.demand import Demand
from router.fleet import Fleet, Member
from router.load_book import DecodeCharge, LoadBook
from router.policy import Choice, JointPolicy
from router.prefix_index import GRANULE_TOKENS, PrefixIndex, hash_granules
from router.worker_key import WorkerKey


def _key(name: str) -> WorkerKey:
    return WorkerKey(worker_id=WorkerId(name), incarnation=Incarnation(1))


class Pool:
    """Workers whose blocks hold one token, so that costs without a predictor are whole numbers."""

    def __init__(self, **loads: int) -> None:
        self.fleet = Fleet()
        self.book = LoadBook(self.fleet, ManualClock())
        self.policy = JointPolicy(self.fleet, LawTable(self.fleet, Predictor()))
        for name, load in loads.items():
            self.add(name, load)

    def add(self, name: str, load: int = 0, *, digest: bytes = b"x", total: int = 1000) -> None:
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        member = Member(
            key=_key(name),
            role=role,
            digest=digest,
            worker_class="c",
            total_blocks=total,
            block_size=1,
        )
        self.fleet.join(member)
        self.fleet.set_available(_key(name), is_available=True)
        if load:
            self.load(name, load)

    def load(self, name: str, blocks: int) -> None:
        if name.startswith("p"):
            self.book.charge_prefill(RequestId(f"on-{name}"), _key(name), (1, blocks, 0))
        else:
            charge = DecodeCharge(num_seqs=1, kv_tokens=blocks, blocks=blocks)
            self.book.charge_decode(RequestId(f"on-{name}"), _key(name), charge)
        self.fleet.last_pick[:] = 0

    def choose(
        self,
        prompt: int = 10,
        growth: int = 2,
        cached: dict[str, int] | None = None,
        **over: object,
    ) -> Choice:
        return self.policy.choose(self.demand(prompt, growth, cached or {}, **over), 0.0)

    def demand(self, prompt: int, growth: int, cached: dict[str, int], **over: object) -> Demand:
        return Demand(
            num_tokens=prompt,
            num_growth_tokens=growth,
            cached_rows=np.array([self.fleet.row_of(_key(name)) for name in cached], dtype=int),
            cached_tokens=np.array(list(cached.values()), dtype=int),
            **over,
        )


@pytest.mark.parametrize(
    ("loads", "cached", "expected"),
    [
        ({"p0": 5, "p1": 4, "d0": 0, "d1": 1}, {}, ("p1", "d0")),
        ({"p0": 5, "p1": 0, "d0": 0, "d1": 0}, {"p0": 8}, ("p0", "d0")),
        ({"p0": 12, "p1": 0, "d0": 0, "d1": 0}, {"p0": 8}, ("p1", "d0")),
        ({"p0": 0, "p1": 0, "d0": 3, "d1": 0}, {"d0": 10}, ("p0", "d0")),
    ],
)
def test_affinity_counts_as_much_as_the_queue_in_front_of_it(loads, cached, expected):
    choice = Pool(**loads).choose(cached=cached)
    assert (choice.prefill.worker_id, choice.decode.worker_id) == expected
    assert choice.path == "disaggregated"


def test_of_equal_workers_the_one_picked_longest_ago_is_next():
    pool = Pool(p0=0, p1=0, d0=0)
    pool.fleet.note_pick(pool.fleet.row_of(_key("p1")))
    pool.fleet.note_pick(pool.fleet.row_of(_key("p0")))
    assert pool.choose().prefill.worker_id == "p1"


def test_an_idle_pool_larger_than_the_short_list_is_used_in_turn():
    pool = Pool(**{f"p{number:02}": 0 for number in range(40)}, d0=0)
    picked = []
    for _ in range(40):
        choice = pool.choose()
        pool.fleet.note_pick(pool.fleet.row_of(choice.prefill))
        picked.append(choice.prefill.worker_id)
    assert len(set(picked)) == 40


def test_C11_an_unavailable_worker_is_never_chosen_for_its_prefix():
    pool = Pool(p0=0, p1=500, d0=0)
    pool.fleet.set_available(_key("p0"), is_available=False)
    assert pool.choose(cached={"p0": 10}).prefill.worker_id == "p1"


def test_C11_a_silent_worker_is_not_chosen():
    pool = Pool(p0=0, p1=500, d0=0)
    pool.fleet._silence_s = 3.0
    for name in ("p1", "d0"):
        pool.fleet.hear(_key(name), 10.0)
    choice = pool.policy.choose(pool.demand(10, 2, {"p0": 10}), 11.0)
    assert choice.prefill.worker_id == "p1"


def test_C11_a_worker_that_falls_silent_is_noticed_while_others_come_and_speak():
    pool = Pool(p0=0, p1=500, d0=0)
    pool.fleet._silence_s = 3.0

    def choose(now_s: float, *heard: str) -> str:
        for name in heard:
            pool.fleet.hear(_key(name), now_s)
        choice = pool.policy.choose(pool.demand(10, 2, {"p0": 10}), now_s)
        return choice.prefill.worker_id

    assert choose(10.0, "p0", "p1", "d0") == "p0"
    assert choose(12.0, "p1", "d0") == "p0"
    pool.add("p2", 900)
    assert choose(12.5) == "p0"
    assert choose(13.5, "p2") == "p1"
    assert choose(14.0, "p0") == "p0"


def test_A17_only_workers_of_one_geometry_are_paired():
    pool = Pool()
    pool.add("p0", 50, digest=b"a")
    pool.add("p1", 0, digest=b"b")
    pool.add("d0", 50, digest=b"a")
    choice = pool.choose()
    assert (choice.prefill.worker_id, choice.decode.worker_id) == ("p0", "d0")


def test_A17_the_best_of_each_geometry_compete():
    pool = Pool()
    for name, load, digest in [("p0", 9, b"a"), ("p1", 0, b"b"), ("d0", 0, b"a"), ("d1", 30, b"b")]:
        pool.add(name, load, digest=digest)
    choice = pool.choose()
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
    pool = Pool(**dict.fromkeys(workers, 0))
    with pytest.raises(NoWorker, match=message):
        pool.choose(has_prefill_pool=has_prefill_pool)


def test_without_a_prefill_pool_the_path_is_local():
    choice = Pool(d0=3, d1=0).choose(has_prefill_pool=False)
    assert (choice.prefill, choice.decode.worker_id, choice.path) == (None, "d1", "local")


def test_a_request_larger_than_every_cache_is_too_long():
    with pytest.raises(TooLong, match="1000 KV blocks"):
        Pool(d0=0).choose(990, 11, has_prefill_pool=False)


def test_A2_samples_that_no_cache_can_hold_together_are_too_long():
    # 990 blocks of the prompt, and one for each of them to begin with.
    assert Pool(d0=0).choose(990, 2, num_samples=10, has_prefill_pool=False).decode
    with pytest.raises(TooLong, match=r"1000 KV blocks.*got 1001"):
        Pool(d0=0).choose(990, 2, num_samples=11, has_prefill_pool=False)


def test_A2_samples_go_to_a_worker_that_can_hold_them_all():
    pool = Pool(d0=0, d1=900)
    pool.add("d2", 0, total=18)
    assert pool.choose(num_samples=9, has_prefill_pool=False).decode.worker_id == "d0"
    pool.load("d0", 950)
    assert pool.choose(num_samples=9, has_prefill_pool=False).decode.worker_id != "d2"


def test_a_worker_that_can_never_hold_a_request_is_passed_over():
    pool = Pool(d0=0, d1=500)
    pool.add("d2", 0, total=11)
    pool.load("d0", 700)
    assert pool.choose(has_prefill_pool=False).decode.worker_id == "d1"


def test_excluded_workers_are_passed_over():
    pool = Pool(p0=0, d0=0, d1=9)
    pool.add("d2", 5, digest=b"other")
    demand = pool.demand(10, 2, {}, excluded={_key("d0")})
    assert pool.policy.choose_decode(demand, _key("p0"), 0.0).decode.worker_id == "d1"
    demand = pool.demand(10, 2, {}, excluded={_key("d0"), _key("d1")})
    with pytest.raises(NoWorker):
        pool.policy.choose_decode(demand, _key("p0"), 0.0)
    with pytest.raises(NoWorker, match="p9 is gone"):
        pool.policy.choose_decode(demand, _key("p9"), 0.0)


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
    assert hash_granules(range(2 * GRANULE_TOKENS), b"salt").tolist() == GOLDEN


GOLDEN = [1_477_864_662_402_796_230, 15_918_164_129_993_006_045]


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
    pool = Pool(p0=0, d0=0)
    book, fleet = pool.book, pool.fleet
    p0, d0 = fleet.row_of(_key("p0")), fleet.row_of(_key("d0"))
    request, other = RequestId("r"), RequestId("s")

    def charge(request_id: RequestId, blocks: int) -> None:
        part = DecodeCharge(num_seqs=1, kv_tokens=blocks - 1, blocks=blocks)
        book.charge_decode(request_id, _key("d0"), part)

    book.charge_prefill(request, _key("p0"), (1.0, 5.0, 12.5))
    charge(request, 7)
    charge(other, 1)
    assert fleet.queue[:, p0].tolist() == [1.0, 5.0, 12.5]
    assert (fleet.blocks[d0], fleet.num_seqs[d0], fleet.kv_tokens[d0]) == (8, 2, 6)
    assert fleet.last_pick[d0] > fleet.last_pick[p0] > 0
    charge(request, 4)
    assert (fleet.blocks[d0], fleet.num_seqs[d0]) == (5, 2)
    book.keep_only(request, (_key("d0"),))
    assert (fleet.queue[:, p0].any(), fleet.blocks[d0]) == (False, 5)
    book.keep_only(request, ())
    book.keep_only(request, ())
    book.keep_only(other, ())
    assert (fleet.blocks[d0], fleet.num_seqs[d0], fleet.kv_tokens[d0]) == (0, 0, 0)
    assert book.num_charged == 0


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
    choice = Pool(p0=0, d0=0, d1=5).choose(cached=cached, max_local_tokens=limit)
    assert (choice.path == "local") == (decode is not None)
    if decode is not None:
        assert (choice.prefill, choice.decode.worker_id) == (None, decode)
