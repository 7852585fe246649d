"""Adds the pieces of a sequence up, in the program that finishes the last of them.

Letters as in `pdserve.kernels.decode_attention`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MERGE_SUMS = gl.constexpr(8192)
"""Of pieces that are loaded together."""


@gluon.jit
def merge_arrived(
    partials_ptr,
    log_sums_ptr,
    out_ptr,
    out_stride,
    place,
    num_pieces,
    sequence,
    head,
    GT: gl.constexpr,
    T: gl.constexpr,
    D: gl.constexpr,
    MERGE_ROWS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Adds the pieces of a sequence and KV head up; `place` is the first row of the first."""
    # As many at once as a thread has registers for: each round waits for memory.
    AT_ONCE: gl.constexpr = MERGE_SUMS // (max(num_warps, MERGE_ROWS) * D)
    layout: gl.constexpr = gl.BlockedLayout(
        [AT_ONCE, 1, D // 32], [1, 1, 32], [1, num_warps, 1], [2, 1, 0]
    )
    rows_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    G: gl.constexpr = GT // T
    pieces = gl.arange(0, AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    rows = gl.arange(0, MERGE_ROWS, rows_layout)
    offs_d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    top = gl.full([MERGE_ROWS], float("-inf"), gl.float32, rows_layout)
    total = gl.zeros([MERGE_ROWS], gl.float32, rows_layout)
    acc = gl.zeros([MERGE_ROWS, D], gl.float32, gl.SliceLayout(0, layout))
    for first in range(0, num_pieces, AT_ONCE):
        part = place + (first + pieces)[:, None] * GT + rows[None, :]
        exists = (first + pieces < num_pieces)[:, None] & (rows < GT)[None, :]
        log_sums = gl.load(
            log_sums_ptr + part, mask=exists, other=float("-inf"), cache_modifier=".cg"
        )
        values = gl.load(
            partials_ptr + gl.expand_dims(part, 2) * D + offs_d[None, None, :],
            mask=gl.expand_dims(exists, 2) & (offs_d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = gl.maximum(top, gl.max(log_sums, 0))
        # A row of padding, or a query that sees nothing of these pieces.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        weights = gl.exp2(log_sums - base[None, :])
        shrink = gl.exp2(top - base)
        total = total * shrink + gl.sum(weights, 0)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
        acc = acc * shrink[:, None] + gl.sum(values * gl.expand_dims(weights, 2), 0)
        top = new_top
    total = gl.convert_layout(total, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    out = acc / gl.where(total > 0.0, total, 1.0)[:, None]
    o_rows = gl.arange(0, MERGE_ROWS, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    o_offs_d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    index = (sequence * T + o_rows // G).to(gl.int64) * out_stride + (head * G + o_rows % G) * D
    gl.store(
        out_ptr + index[:, None] + o_offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(o_rows < GT)[:, None] & (o_offs_d < D)[None, :],
    )
