"""Each kernel of a step alone, against its own floor; a part of `benchmarks.gpu_engine`.

Shapes are those of Llama-3-8B in bfloat16. Kernels run in CUDA graphs over more data than the
second-level cache holds. What is checked and swept beside this: `benchmarks.kernels`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.kernels import attention, fused
from benchmarks.kernels.decode import DecodeTimer
from benchmarks.kernels.product import BYTES_PER_S, FLOPS_PER_S, make_weights
from benchmarks.kernels.product_candidates import LLAMA_8B
from benchmarks.kernels.read_rate import measure_read_rate
from pdserve.kernels.prefill_tuning import splits_for
from pdserve.kernels.product_table import LayerShape
from pdserve.kernels.product_timer import make_product_table

HEAD = LayerShape(num_outputs=128256, num_inputs=4096)
DECODE_SHAPES = ((1, 512), (1, 32768), (64, 512), (64, 2048), (256, 512), (256, 2048))
DENSE_SHAPES = ((0, 2048), (0, 8192), (0, 32768))
"""Tokens before a chunk, tokens of it."""
PAGED_SHAPES = ((0, 128), (4096, 128), (4096, 512))
SMALL_ROWS = (1, 64, 256)
SAMPLED_ROWS = (1, 64)
READ_BYTES = 1e9
MUST_READ_SHARE = {(64, 2048): 0.85, (1, 32768): 0.85}
MUST_TFLOP_PER_S = {(0, 8192): 520, (0, 32768): 520}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """One kernel alone."""

    kernel: str
    shape: str
    us: float
    floor_us: float
    """Its bytes at the bandwidth of these cards, or its operations at the measured rate; of decode
    attention its bytes at what this card gives to a kernel that only reads."""
    error: float | None = None
    """Against float64, relative in the norm; None where `benchmarks.kernels` checks it."""
    holds: bool | None = None
    """Whether its bound is met; None if it has none."""


def list_measurements() -> Iterator[tuple[str, Callable[[], list[KernelTime]]]]:
    """Names what can be measured; each job needs a GPU to itself."""
    for rows in SMALL_ROWS:
        for measure in (fused.time_norm, fused.time_silu, fused.time_rotary, fused.time_embedding):
            yield f"{measure.__name__} {rows}", partial(_time_small, measure, rows)
    for rows in SAMPLED_ROWS:
        for name in ("greedy", "temperature", "top_k 50 top_p 0.9"):
            yield f"sampling {name} {rows}", partial(_time_sampling, name, rows)
    yield "decode attention", _time_all_decode
    for shape in DENSE_SHAPES:
        yield f"dense attention {shape}", partial(_time_dense, shape)
    for shape in PAGED_SHAPES:
        yield f"paged attention {shape}", partial(_time_paged, shape)
    yield "products", _time_products


def _time_small(measure: Callable[[int, int], fused.Figure], rows: int) -> list[KernelTime]:
    return [_of_figure(measure(rows, 1))]


def _time_sampling(name: str, rows: int) -> list[KernelTime]:
    return [_of_figure(fused.time_sampling(name, rows, torch.float32))]


def _of_figure(figure: fused.Figure) -> KernelTime:
    return KernelTime(
        kernel=figure.kernel,
        shape=f"{figure.rows}",
        us=figure.us,
        floor_us=figure.floor_us,
        error=figure.error,
    )


def _time_all_decode() -> list[KernelTime]:
    bytes_per_us = measure_read_rate()
    found = [
        KernelTime(
            kernel="reading alone",
            shape=f"{bytes_per_us / 1e6:.3f} TB/s",
            us=READ_BYTES / bytes_per_us,
            floor_us=1e6 * READ_BYTES / BYTES_PER_S,
        )
    ]
    for shape in DECODE_SHAPES:
        found += _time_decode(shape, bytes_per_us)
    return found


def _time_decode(shape: attention.Shape, bytes_per_us: float) -> list[KernelTime]:
    timer = DecodeTimer(shape)
    floor_us = timer.kv_bytes / bytes_per_us
    found = []
    for way, kernel in (("chain", "decode attention"), ("alone", "decode attention, no overlap")):
        us = timer.time(None, way)
        share = MUST_READ_SHARE.get(shape) if way == "chain" else None
        found.append(
            KernelTime(
                kernel=kernel,
                shape=f"{shape[0]} x {shape[1]}",
                us=us,
                floor_us=floor_us,
                holds=None if share is None else floor_us / us >= share,
            )
        )
    return found


def _time_dense(shape: attention.Shape) -> list[KernelTime]:
    return [_prefill_time("prefill attention, dense", shape, attention.time_dense(shape))]


def _time_paged(shape: attention.Shape) -> list[KernelTime]:
    context, tokens = shape
    us = attention.time_prefill(shape, None, splits_for(tokens, context))
    return [_prefill_time("prefill attention, paged", shape, us)]


def _prefill_time(kernel: str, shape: attention.Shape, us: float) -> KernelTime:
    flops = attention.prefill_flops(shape)
    must = MUST_TFLOP_PER_S.get(shape)
    return KernelTime(
        kernel=kernel,
        shape=f"{shape[0]}+{shape[1]}",
        us=us,
        floor_us=1e6 * flops / FLOPS_PER_S,
        holds=None if must is None else flops / us / 1e6 >= must,
    )


def _time_products() -> list[KernelTime]:
    """Times each layer's chosen product with the small kernel that reads its result."""
    weights = make_weights()
    table = make_product_table(
        {shape.layer: weights[shape.name] for shape in LLAMA_8B},
        head=HEAD,
        use_pdl=fused.USE_PDL,
        cache=None,
        is_deterministic=False,
    )
    return [
        KernelTime(
            kernel=f"product {shape.name}, {'own' if choice.plan is not None else 'library'}",
            shape=f"{rows}",
            us=choice.us,
            floor_us=shape.floor_us(rows, BYTES_PER_S, FLOPS_PER_S),
        )
        for shape in LLAMA_8B
        for rows, choice in table.choices[shape.layer].items()
        if choice.us is not None
    ]
