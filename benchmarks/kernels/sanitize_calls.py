"""Launches each kernel on small odd sizes, for `sanitize`; cuDNN and cuBLAS are left out.

    python -m benchmarks.kernels.sanitize_calls NAME

Inputs are made on the host and NaN stands wherever a kernel must not read, so that few other
kernels run, and those of torch that do are copies.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product

import torch
from torch import Tensor

from benchmarks.kernels.paged import BLOCK_SIZE, make_paged_kv
from benchmarks.kernels.sanitize_ranks import call_gather, call_shared_choice, call_sums
from pdserve.kernels import prefill_attention
from pdserve.kernels.decode_attention import DecodeTuning, decode_attention
from pdserve.kernels.decode_scratch import make_scratch
from pdserve.kernels.embedding import embed, embed_and_norm
from pdserve.kernels.merge import merge_splits
from pdserve.kernels.norm import add_norm
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.rotary_store import rotate_and_store
from pdserve.kernels.sampling import sample_rows
from pdserve.kernels.sampling_state import DeviceSampling
from pdserve.kernels.silu_mul import silu_mul
from pdserve.kernels.small_product import small_product
from pdserve.kernels.step_inputs import take_step_inputs
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_PDL = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter knows no bfloat16."""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype).to(DEVICE)


def whole(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def check_written(*outputs: Tensor) -> None:
    for number, output in enumerate(outputs):
        assert bool(output.cpu().isfinite().all()), f"output {number} holds NaN"


def variants() -> Iterator[tuple[int, torch.dtype, bool]]:
    """Splits of the product before, model dtype, dependent launch."""
    yield 1, HALF, HAS_PDL
    yield 3, torch.float32, False


def call_norm() -> None:
    rows, columns = 5, 577
    for num_splits, dtype, use_pdl in variants():
        residual, gain = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)
        out = nans(rows, columns, dtype=dtype)
        x = randn(num_splits, rows, columns, dtype=dtype if num_splits == 1 else torch.float32)
        add_norm(x, residual, gain, out, epsilon=1e-5, use_pdl=use_pdl)
        add_norm(None, residual, gain, out, epsilon=1e-5, use_pdl=use_pdl)
        few = nans(2, columns, dtype=dtype)
        add_norm(x, residual, gain, few, epsilon=1e-5, rows_R=whole(4, 1), use_pdl=use_pdl)
        check_written(out, few, residual)


def call_embedding() -> None:
    for _, dtype, use_pdl in variants():
        table, gain = randn(37, 300, dtype=dtype), randn(300, dtype=dtype)
        residual, out = nans(3, 300, dtype=dtype), nans(3, 300, dtype=dtype)
        embed(whole(36, 0, 5), table, residual, use_pdl=use_pdl)
        embed_and_norm(whole(36, 0, 5), table, residual, gain, out, epsilon=1e-5, use_pdl=use_pdl)
        check_written(residual, out)


def call_silu_mul() -> None:
    for num_splits, dtype, use_pdl in variants():
        for num_rows in (1, 7):
            x = randn(num_splits, num_rows, 2 * 333, dtype=dtype)
            out = nans(num_rows, 333, dtype=dtype)
            silu_mul(x, out, use_pdl=use_pdl)
            silu_mul(x, out, bias_N=randn(2 * 333, dtype=dtype), use_pdl=use_pdl)
            check_written(out)


def call_rotary_store() -> None:
    heads, kv_heads, dim = 6, 2, 80
    for (num_splits, dtype, use_pdl), num_rows in product(variants(), (1, 5)):
        x = randn(num_splits, num_rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        keys, values = (nans(9, kv_heads, dim, dtype=dtype) for _ in range(2))
        q = nans(num_rows, heads, dim, dtype=dtype)
        slots, positions = (whole(8, -1, 0, 3, 4)[:num_rows], whole(10, 0, 3, 2, 1)[:num_rows])
        cos, sin = (randn(11, dim // 2) for _ in range(2))
        gain = randn(dim, dtype=dtype)
        for is_rotated, with_extras in ((True, False), (True, True), (False, False)):
            rotate_and_store(
                x,
                positions,
                slots,
                cos,
                sin,
                keys,
                values,
                q,
                num_heads=heads,
                bias_N=randn(x.shape[2], dtype=dtype) if with_extras else None,
                q_gain_D=gain if with_extras else None,
                k_gain_D=gain if with_extras else None,
                epsilon=1e-6,
                is_rotated=is_rotated,
                use_pdl=use_pdl,
            )
        stored = [slot for slot in slots.tolist() if slot >= 0]
        check_written(q, keys[stored], values[stored])


def call_step_inputs() -> None:
    tables, ids = whole(*range(60)), whole(*([-7] * 5))
    updates = whole(2, 0, 0, 0, 59, 3, 0, 4)
    take_step_inputs(whole(4, -2, 9, -1, 0), whole(11, 12), ids, updates, tables)
    assert ids.tolist() == [4, 12, 9, 11, 0]
    assert tables[[59, 0]].tolist() == [3, 4]


SAMPLING = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=5),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=3.0, top_k=3000, top_p=0.9),
)
"""The last one keeps more than `filters` ranks."""


def call_sampling() -> None:
    for vocab_size, dtype in ((5003, torch.float32), (9001, HALF)):
        # The last column of each row is not the vocabulary's.
        room = nans(len(SAMPLING), vocab_size + 1, dtype=dtype)
        logits = room[:, :vocab_size]
        logits.copy_(randn(len(SAMPLING), vocab_size, dtype=dtype))
        ids = whole(*([-7] * len(SAMPLING)))
        logprobs = nans(len(SAMPLING))
        rows = DeviceSampling(len(SAMPLING), vocab_size, DEVICE)
        for num_rows in (1, 2, len(SAMPLING)):
            rows.write(
                {
                    index: SamplingRow(params=params, output_index=index)
                    for index, params in enumerate(SAMPLING[:num_rows])
                }
            )
            for given in (None, logprobs[:num_rows]):
                sample_rows(logits[:num_rows], rows, ids[:num_rows], given, use_pdl=HAS_PDL)
        check_written(logprobs)
        assert all(0 <= token < vocab_size for token in ids.tolist())


def call_merge() -> None:
    for num_splits, dim in ((2, 64), (3, 80)):
        out = nans(5, 6, dim, dtype=HALF)
        partials, log_sums = randn(num_splits, 5, 6, dim), randn(num_splits, 5, 6)
        merge_splits(partials, log_sums, whole(4), out, num_splits=num_splits, use_pdl=HAS_PDL)
        check_written(out[:4])


def multiply(
    plan: ProductPlan, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    x, weight = (
        randn(num_rows, num_inputs, dtype=dtype),
        randn(num_outputs, num_inputs, dtype=dtype),
    )
    out = nans(plan.num_splits, num_rows, num_outputs)
    small_product(x, weight, out, plan, use_pdl=HAS_PDL)
    check_written(out)


def call_row_product() -> None:
    plan = ProductPlan(
        kernel="row", num_splits=2, block_n=4, block_k=256, num_stages=1, num_warps=4
    )
    for num_rows in (1, 5):
        multiply(plan, num_rows, 67, 531, torch.float32)


def call_tiled_product() -> None:
    plan = ProductPlan(
        kernel="tiled", num_splits=2, block_n=64, block_k=32, num_stages=3, num_warps=4
    )
    for num_rows, dtype in ((3, torch.float32), (37, HALF)):
        multiply(plan, num_rows, 131, 203, dtype)


def call_streamed_product() -> None:
    shapes = ((3, 64, 4, 2, None), (70, 128, 4, 1, 1), (200, 128, 8, 2, None))
    for num_rows, block_n, num_warps, num_splits, programs in shapes:
        plan = ProductPlan(
            kernel="streamed",
            num_splits=num_splits,
            block_n=block_n,
            block_k=64,
            num_stages=3,
            num_warps=num_warps,
            programs_per_sm=programs,
        )
        multiply(plan, num_rows, 203, 328, torch.bfloat16)


def call_gated_product() -> None:
    for num_rows, block_n, num_warps in ((3, 64, 4), (70, 64, 4), (200, 64, 8), (100, 128, 8)):
        plan = ProductPlan(
            kernel="gated",
            num_splits=1,
            block_n=block_n,
            block_k=64,
            num_stages=3,
            num_warps=num_warps,
        )
        x, weight = (
            randn(num_rows, 328, dtype=torch.bfloat16),
            randn(406, 328, dtype=torch.bfloat16),
        )
        out = nans(1, num_rows, 203, dtype=torch.bfloat16)
        small_product(x, weight, out, plan, use_pdl=HAS_PDL)
        check_written(out)


def attend(
    dim: int,
    dtype: torch.dtype,
    lengths: Sequence[int],
    *,
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    split_tokens: int | None = None,
    tuning: DecodeTuning | None = None,
) -> None:
    kv = make_paged_kv(lengths, 2, dim, is_poisoned=True, dtype=dtype, device=str(DEVICE))
    num_rows = len(lengths) * queries
    q, out = (make(num_rows, 6, dim, dtype=dtype) for make in (randn, nans))
    scratch = make_scratch(num_rows, 6, dim, 8, DEVICE)
    for _ in range(2):  # the second finds what the first left in the scratch
        decode_attention(
            q,
            kv.keys,
            kv.values,
            kv.tables,
            kv.lengths,
            out,
            scratch,
            block_size=BLOCK_SIZE,
            scale=dim**-0.5,
            window=window,
            soft_cap=soft_cap,
            queries_per_sequence=queries,
            split_tokens=split_tokens,
            tuning=tuning,
            use_pdl=HAS_PDL,
        )
    present = [row for row in range(num_rows) if lengths[row // queries]]
    check_written(out[present])


LENGTHS = (5, 0, 71, 300)


def call_decode_attention() -> None:
    tuning = DecodeTuning()
    attend(64, HALF, LENGTHS, tuning=tuning)
    attend(80, HALF, LENGTHS, window=33, soft_cap=20.0, tuning=tuning)
    attend(128, torch.float32, LENGTHS, split_tokens=64)


def call_streamed_decode() -> None:
    """On Hopper; elsewhere the portable kernel does it."""
    attend(64, HALF, LENGTHS)
    attend(128, HALF, LENGTHS, window=33, soft_cap=20.0)
    attend(128, HALF, LENGTHS, queries=3)
    attend(256, HALF, (1, 40))
    attend(128, HALF, (2000,))


def call_prefill_attention() -> None:
    chunks = ((0, 37), (5, 1), (131, 70))
    starts = [0, *accumulate(queries for _, queries in chunks)]
    cases: tuple[tuple[int, int | None, int, torch.dtype], ...] = (
        (64, None, 1, HALF),
        (80, 33, 2, HALF),
        (128, None, 1, torch.float32),
    )
    for dim, window, num_splits, dtype in cases:
        kv = make_paged_kv(
            [sum(chunk) for chunk in chunks],
            2,
            dim,
            is_poisoned=True,
            dtype=dtype,
            device=str(DEVICE),
        )
        num_rows = starts[-1] + 3
        q, out = (make(num_rows, 6, dim, dtype=dtype) for make in (randn, nans))
        scratch = prefill_attention.make_scratch(num_rows, 6, dim, num_splits, DEVICE)
        prefill_attention.prefill_attention(
            q,
            kv.keys,
            kv.values,
            kv.tables,
            whole(*starts),
            whole(*(context for context, _ in chunks)),
            out,
            max_query_tokens=70,
            block_size=BLOCK_SIZE,
            scale=dim**-0.5,
            window=window,
            num_splits=num_splits,
            scratch=scratch,
            use_pdl=HAS_PDL,
        )
        if num_splits > 1:
            valid = whole(starts[-1])
            merge_splits(scratch.partials, scratch.log_sums, valid, out, num_splits=num_splits)
        check_written(out[: starts[-1]])


CALLS: dict[str, Callable[[], None]] = {
    "sampling": call_sampling,
    "decode_attention": call_decode_attention,
    "streamed_decode": call_streamed_decode,
    "prefill_attention": call_prefill_attention,
    "streamed_product": call_streamed_product,
    "gated_product": call_gated_product,
    "tiled_product": call_tiled_product,
    "row_product": call_row_product,
    "rotary_store": call_rotary_store,
    "norm": call_norm,
    "embedding": call_embedding,
    "silu_mul": call_silu_mul,
    "merge": call_merge,
    "step_inputs": call_step_inputs,
    "sums_over_ranks": partial(call_sums, DEVICE, variants),
    "gather_over_ranks": partial(call_gather, DEVICE, variants),
    "shared_choice": partial(call_shared_choice, DEVICE, variants),
}
"""The slow ones first."""


def main() -> None:
    torch.manual_seed(0)
    (name,) = sys.argv[1:]
    CALLS[name]()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print(f"{name}: done")


if __name__ == "__main__":
    main()
