"""What fronts and their brain say comes out as it went in."""

from array import array

import numpy as np
import pytest

from pdserve.errors import NoBrain, NoWorker, PdserveError, TooLong
from pdserve.request import Incarnation, RequestId, WorkerId
from router.brain.wire import (
    holding_from_wire,
    holding_to_wire,
    placed_from_wire,
    placed_to_wire,
    query_from_wire,
    query_to_wire,
    refusal_from_wire,
    refusal_to_wire,
)
from router.candidates import TERMS, CandidateTable
from router.load_book import DecodeCharge, Holding
from router.placer import Placed, PlaceQuery
from router.policy import Choice
from router.slo import TooLate
from router.worker_key import WorkerKey

P0 = WorkerKey(WorkerId("p0"), Incarnation(1 << 63))
D0 = WorkerKey(WorkerId("d0"), Incarnation(2))


def test_a_query_comes_out_as_it_went_in() -> None:
    query = PlaceQuery(
        request_id=RequestId("r"),
        num_tokens=131_072,
        num_growth_tokens=7,
        granules=array("Q", (0, (1 << 64) - 1)),
        may_be_local=False,
        excluded=frozenset((P0, D0)),
        followers=(RequestId("r#1"),),
        has_prefill_pool=False,
        tpot_slo_s=0.05,
        ttft_slo_s=-0.25,
        tenant="a",
        priority=9,
        waits_for_turn=True,
    )
    assert query_from_wire(query_to_wire(query), RequestId) == query


def test_a_query_without_wishes_has_none_afterwards() -> None:
    query = PlaceQuery(
        request_id=RequestId("r"), num_tokens=1, num_growth_tokens=1, granules=array("Q"),
        excluded=frozenset(),
    )  # fmt: skip
    assert query_from_wire(query_to_wire(query), RequestId) == query


@pytest.mark.parametrize("prefill", [P0, None])
def test_a_choice_comes_out_with_its_table_and_its_charges(prefill: WorkerKey | None) -> None:
    terms = np.arange(2 * len(TERMS), dtype=np.float64).reshape(2, -1) / 3
    charge = DecodeCharge(num_seqs=1, kv_tokens=70.5, blocks=9)
    placed = Placed(
        choice=Choice(
            prefill=prefill,
            decode=D0,
            path="disaggregated" if prefill else "local",
            cached_tokens=128,
            cached_blocks=8,
            table=CandidateTable(is_in_seconds=True, terms=terms, pairs=((prefill, D0), (P0, D0))),
            transfer_s=17.0,
        ),
        prompt=(1.0, 60.0, 1800.0) if prefill else None,
        decode=charge,
        follower=DecodeCharge(num_seqs=1, kv_tokens=3.5, blocks=1),
    )
    found = placed_from_wire(placed_to_wire(placed))
    assert found.choice.expected == placed.choice.expected
    assert found.choice.table.pairs == placed.choice.table.pairs
    assert np.array_equal(found.choice.table.terms, terms)
    assert (found.choice.prefill, found.choice.path) == (prefill, placed.choice.path)
    assert (found.choice.cached_tokens, found.choice.cached_blocks) == (128, 8)
    assert (found.prompt, found.decode) == (placed.prompt, charge)
    assert found.follower == placed.follower
    assert found.choice.transfer_s is None


@pytest.mark.parametrize("prompt", [(1.0, 2.0, 3.0), None])
@pytest.mark.parametrize("decode", [DecodeCharge(num_seqs=1, kv_tokens=0.5, blocks=0), None])
def test_a_holding_comes_out_under_the_brain_s_own_name(
    prompt: tuple[float, float, float] | None, decode: DecodeCharge | None
) -> None:
    holding = Holding(request_id=RequestId("r"), worker=P0, prefill=prompt, decode=decode)
    found = holding_from_wire(holding_to_wire(holding), lambda text: RequestId(f"7/{text}"))
    assert found == Holding(request_id=RequestId("7/r"), worker=P0, prefill=prompt, decode=decode)


@pytest.mark.parametrize(
    "error",
    [
        TooLate("the first token would come in 9 s", 7.5),
        NoWorker("no decode worker is available", 2.0),
        NoBrain("away", 3.0),
        TooLong("prompt", 99, "at most 10 KV blocks with its output"),
    ],
)
def test_a_refusal_keeps_its_kind_its_text_and_when_to_come_again(error: PdserveError) -> None:
    found = refusal_from_wire(refusal_to_wire(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    if isinstance(error, TooLate | NoWorker):
        assert isinstance(found, TooLate | NoWorker)
        assert found.retry_after_s == error.retry_after_s
    if isinstance(error, TooLong):
        assert isinstance(found, TooLong)
        assert (found.field, found.limit) == (error.field, error.limit)
