"""Turns what fronts and their brain say to each other into messages and back."""

from array import array
from collections.abc import Callable, Iterable

import numpy as np

from pdserve.errors import InvalidField, NoWorker, Overloaded, PdserveError
from pdserve.request import Incarnation, RequestId, WorkerId
from pdserve.rpc.error_parts import error_from_parts
from pdserve.rpc.v1 import brain_pb2
from router.admission import AdmittedLoad
from router.candidates import CandidateTable
from router.load_book import DecodeCharge, Holding
from router.placer import Placed, PlaceQuery
from router.policy import Choice
from router.prompt_queue import Terms
from router.slo import TooLate
from router.worker_key import WorkerKey

Namer = Callable[[str], RequestId]
"""Makes a request's id one that no other front has."""


def worker_to_wire(key: WorkerKey) -> brain_pb2.WorkerName:
    """Encodes a worker's key."""
    return brain_pb2.WorkerName(worker_id=key.worker_id, incarnation=key.incarnation)


def worker_from_wire(name: brain_pb2.WorkerName) -> WorkerKey:
    """Decodes a worker's key."""
    return WorkerKey(WorkerId(name.worker_id), Incarnation(name.incarnation))


def query_to_wire(query: PlaceQuery) -> brain_pb2.PlaceCall:
    """Encodes a request that wants workers."""
    return brain_pb2.PlaceCall(
        request_id=query.request_id,
        num_tokens=query.num_tokens,
        num_growth_tokens=query.num_growth_tokens,
        granules=query.granules,
        may_be_local=query.may_be_local,
        has_prefill_pool=query.has_prefill_pool,
        waits_for_turn=query.waits_for_turn,
        excluded=[worker_to_wire(key) for key in query.excluded],
        followers=query.followers,
        tpot_slo_s=query.tpot_slo_s,
        ttft_slo_s=query.ttft_slo_s,
        tenant=query.tenant,
        priority=query.priority,
    )


def query_from_wire(wire: brain_pb2.PlaceCall, name: Namer) -> PlaceQuery:
    """Decodes a request that wants workers."""
    return PlaceQuery(
        request_id=name(wire.request_id),
        num_tokens=wire.num_tokens,
        num_growth_tokens=wire.num_growth_tokens,
        granules=array("Q", wire.granules),
        may_be_local=wire.may_be_local,
        has_prefill_pool=wire.has_prefill_pool,
        waits_for_turn=wire.waits_for_turn,
        excluded=frozenset(worker_from_wire(one) for one in wire.excluded),
        followers=tuple(name(one) for one in wire.followers),
        tpot_slo_s=wire.tpot_slo_s if wire.HasField("tpot_slo_s") else None,
        ttft_slo_s=wire.ttft_slo_s if wire.HasField("ttft_slo_s") else None,
        tenant=wire.tenant,
        priority=wire.priority,
    )


def placed_to_wire(placed: Placed) -> brain_pb2.Chosen:
    """Encodes a choice with all that it was made from."""
    choice, table = placed.choice, placed.choice.table
    return brain_pb2.Chosen(
        ways=[
            brain_pb2.Way(
                prefill=None if prefill is None else worker_to_wire(prefill),
                decode=worker_to_wire(decode),
            )
            for prefill, decode in table.pairs
        ],
        terms=table.terms.ravel().tolist(),
        is_in_seconds=table.is_in_seconds,
        cached_tokens=choice.cached_tokens,
        cached_blocks=choice.cached_blocks,
        prompt=placed.prompt,
        decode=_part_to_wire(placed.decode),
        follower=_part_to_wire(placed.follower),
    )


def placed_from_wire(wire: brain_pb2.Chosen) -> Placed:
    """Decodes a choice; until when it keeps links is the brain's own affair."""
    pairs = tuple(
        (
            worker_from_wire(way.prefill) if way.HasField("prefill") else None,
            worker_from_wire(way.decode),
        )
        for way in wire.ways
    )
    prefill, decode = pairs[0]
    choice = Choice(
        prefill=prefill,
        decode=decode,
        path="local" if prefill is None else "disaggregated",
        cached_tokens=wire.cached_tokens,
        cached_blocks=wire.cached_blocks,
        table=CandidateTable(
            is_in_seconds=wire.is_in_seconds,
            terms=np.array(wire.terms, dtype=np.float64).reshape(len(pairs), -1),
            pairs=pairs,
        ),
    )
    return Placed(
        choice=choice,
        prompt=_terms_from_wire(wire.prompt),
        decode=_part_from_wire(wire.decode),
        follower=_part_from_wire(wire.follower),
    )


def holding_to_wire(holding: Holding) -> brain_pb2.Holding:
    """Encodes what a request is charged at a worker."""
    return brain_pb2.Holding(
        request_id=holding.request_id,
        worker=worker_to_wire(holding.worker),
        prompt=holding.prefill,
        decode=None if holding.decode is None else _part_to_wire(holding.decode),
    )


def holding_from_wire(wire: brain_pb2.Holding, name: Namer) -> Holding:
    """Decodes what a request is charged at a worker."""
    return Holding(
        request_id=name(wire.request_id),
        worker=worker_from_wire(wire.worker),
        prefill=_terms_from_wire(wire.prompt),
        decode=_part_from_wire(wire.decode) if wire.HasField("decode") else None,
    )


def refusal_to_wire(error: PdserveError) -> brain_pb2.PlaceRefusal:
    """Encodes why a request got no workers."""
    field, limit = (error.field, error.limit) if isinstance(error, InvalidField) else ("", "")
    return brain_pb2.PlaceRefusal(
        code=error.grpc_code,
        reason=error.reason,
        message=str(error),
        field=field,
        limit=limit,
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded | NoWorker) else None,
        is_too_late=isinstance(error, TooLate),
    )


def refusal_from_wire(wire: brain_pb2.PlaceRefusal) -> PdserveError:
    """Decodes why a request got no workers."""
    if wire.is_too_late:
        return TooLate(wire.message, wire.retry_after_s)
    return error_from_parts(
        code=wire.code,
        reason=wire.reason,
        message=wire.message,
        field=wire.field,
        limit=wire.limit,
        retry_after_s=wire.retry_after_s if wire.HasField("retry_after_s") else None,
    )


def _part_to_wire(charge: DecodeCharge) -> brain_pb2.DecodePart:
    return brain_pb2.DecodePart(
        num_seqs=charge.num_seqs, kv_tokens=charge.kv_tokens, blocks=charge.blocks
    )


def _part_from_wire(wire: brain_pb2.DecodePart) -> DecodeCharge:
    return DecodeCharge(num_seqs=wire.num_seqs, kv_tokens=wire.kv_tokens, blocks=wire.blocks)


def _terms_from_wire(values: Iterable[float]) -> Terms | None:
    terms = tuple(values)
    if not terms:
        return None
    steps, tokens, pairs = terms
    return (steps, tokens, pairs)


def load_to_wire(load: AdmittedLoad) -> brain_pb2.FrontLoad:
    """Encodes what fronts have admitted."""
    return brain_pb2.FrontLoad(num_in_flight=load.num_in_flight, num_waiting=load.num_waiting)


def load_from_wire(wire: brain_pb2.FrontLoad) -> AdmittedLoad:
    """Decodes what fronts have admitted."""
    return AdmittedLoad(num_in_flight=wire.num_in_flight, num_waiting=wire.num_waiting)
