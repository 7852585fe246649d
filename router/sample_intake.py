"""Feeds the predictor with what workers say their steps took."""

from collections.abc import Iterable

from pdserve.predictor.predictor import (
    DecodeSample,
    Predictor,
    PrefillSample,
    Sample,
    TransferSample,
)
from pdserve.request import Incarnation
from pdserve.rpc.v1 import types_pb2


def observe_samples(
    predictor: Predictor,
    worker_class: str,
    life: Incarnation,
    samples: Iterable[types_pb2.StepSample],
) -> None:
    """Observes each sample; kinds of later versions are left out."""
    for sample in samples_from_wire(samples):
        predictor.observe(worker_class, life, sample)


def samples_from_wire(samples: Iterable[types_pb2.StepSample]) -> tuple[Sample, ...]:
    """Decodes samples; kinds of later versions are left out."""
    found = (_sample_from_wire(wire) for wire in samples)
    return tuple(sample for sample in found if sample is not None)


def _sample_from_wire(wire: types_pb2.StepSample) -> Sample | None:
    match wire.WhichOneof("kind"):
        case "prefill":
            return PrefillSample(
                num_tokens=wire.prefill.num_tokens,
                num_context_tokens=wire.prefill.num_context_tokens,
                seconds=wire.seconds,
            )
        case "decode":
            return DecodeSample(
                num_sequences=wire.decode.num_sequences,
                num_kv_tokens=wire.decode.num_kv_tokens,
                seconds=wire.seconds,
            )
        case "transfer":
            return TransferSample(num_bytes=wire.transfer.num_bytes, seconds=wire.seconds)
        case _:
            return None
