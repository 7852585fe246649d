"""Hopper's decode attention: KV streamed through a ring in shared memory, one launch.

Letters as in `pdserve.kernels.decode_attention`; a unit is what one copy brings, 16 to 64 tokens of
one block. Written in Gluon (Triton's explicit dialect), because of what decides here:

1. A warp of its own asks the bulk copy engine to fill a ring of tiles, which runs on over the ends
   of pieces: memory is read while a piece is finished or its queries are fetched.
2. KV of earlier steps depends on no kernel of this one: the ring is requested BEFORE
   `griddepcontrol.wait`, but for tiles that hold the queries' own tokens.
3. The KV tile is the FIRST operand of the tensor core instruction, so that few rows cost few
   columns: scores[TILE, ROWS] = K @ Q^T and out[D, ROWS] = V^T @ P.
4. The last program to finish a piece of a sequence adds all of them up, in their order. A sequence
   of one piece is written at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.streamed_merge import merge_arrived
from pdserve.kernels.streamed_shares import advance, count_units, find_share


@gluon.jit
def _load_blocks(
    tables_ptr,
    table_stride,
    sequence,
    token,
    count,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
):
    """Returns the block ids of up to four units from `token` on."""
    table_ptr = tables_ptr + sequence.to(gl.int64) * table_stride
    block_0 = gl.load(table_ptr + token // BLOCK_SIZE, mask=count > 0, other=0)
    block_1 = gl.load(table_ptr + (token + UNIT) // BLOCK_SIZE, mask=count > 1, other=0)
    block_2 = gl.load(table_ptr + (token + 2 * UNIT) // BLOCK_SIZE, mask=count > 2, other=0)
    block_3 = gl.load(table_ptr + (token + 3 * UNIT) // BLOCK_SIZE, mask=count > 3, other=0)
    return block_0, block_1, block_2, block_3


@gluon.jit
def _request(
    keys_desc,
    values_desc,
    keys,
    values,
    full,
    slot,
    blocks,
    token,
    count,
    is_wanted,
    column,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    UNITS: gl.constexpr,
    D: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Asks for the units of a tile; those that are not there arrive at once, with nothing."""
    ready = full.index(slot)
    CHUNKS: gl.constexpr = D // CHUNK
    unit_bytes: gl.constexpr = 2 * CHUNKS * keys_desc.block_type.nbytes
    for u in gl.static_range(UNITS):
        exists = is_wanted & (u < count)
        row = blocks[u] * BLOCK_SIZE + (token + u * UNIT) % BLOCK_SIZE
        mbarrier.expect(ready, unit_bytes, pred=exists)
        mbarrier.arrive(ready, pred=is_wanted & (u >= count))
        for c in gl.static_range(CHUNKS):
            place = (slot * CHUNKS + c) * UNITS + u
            at = [row, column + c * CHUNK]
            tma.async_copy_global_to_shared(keys_desc, at, ready, keys.index(place), pred=exists)
            tma.async_copy_global_to_shared(
                values_desc, at, ready, values.index(place), pred=exists
            )


@gluon.jit
def _consume(
    q_ptr, lengths_ptr, out_ptr, partials_ptr, log_sums_ptr, arrivals_ptr,
    q_stride, out_stride, max_splits, scale, key_tiles, value_tiles, queries, weights, full, empty,
    batch, team, num_teams, least_units, head,
    J: gl.constexpr, GT: gl.constexpr, T: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    MERGE_ROWS: gl.constexpr, UNIT: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr,
    BATCH_PAD: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, USE_PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Attends to tile after tile of the ring."""
    share, place, sequence, unit, units, length, origin, left = find_share(
        lengths_ptr, batch, team, num_teams, least_units, max_splits, T, UNIT, WINDOW, BATCH_PAD,
        num_warps,
    )  # fmt: skip
    if USE_PDL:
        gdc_wait()
    G: gl.constexpr = GT // T
    dtype: gl.constexpr = key_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    q_rows = gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    q_offs_d = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    v_tokens = gl.arange(0, TILE, gl.SliceLayout(1, v_layout))
    tokens = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    offs_d = gl.arange(0, D, gl.SliceLayout(1, layout))
    slot = 0
    phase = 0
    while left > 0:
        num_units = gl.minimum(units - unit, left)
        begin = place - unit
        piece = team - begin // share
        num_pieces = (begin + units - 1) // share - begin // share + 1
        q_index = (sequence * T + q_rows // G).to(gl.int64) * q_stride
        q = gl.load(
            q_ptr + (q_index + (head * G + q_rows % G) * D)[:, None] + q_offs_d[None, :],
            mask=(q_rows < GT)[:, None],
            other=0.0,
        )
        queries.store(q)
        fence_async_shared()
        limits = length - (T - 1) + rows // G
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        totals = gl.zeros([TILE, ROWS], gl.float32, layout)
        acc = gl.zeros([D, ROWS], gl.float32, layout)
        first = origin + unit * UNIT
        end = gl.minimum(first + num_units * UNIT, length)
        for token in range(first, end, TILE):
            mbarrier.wait(full.index(slot), phase)
            scores = warpgroup_mma(
                key_tiles.index(slot),
                queries.permute((1, 0)),
                gl.zeros([TILE, ROWS], gl.float32, layout),
                use_acc=False,
            )
            scores *= scale
            if SOFT_CAP is not None:
                # tanh(x) = 1 - 2 / (e^2x + 1), right for any x.
                grown = gl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
                scores = SOFT_CAP - 2.0 * SOFT_CAP / (grown + 1.0)
            is_seen = (token + tokens < end)[:, None] & (rows < ROWS)[None, :]
            if T > 1:
                is_seen &= (token + tokens)[:, None] < limits[None, :]
            if WINDOW is not None:
                is_seen &= (token + tokens)[:, None] >= limits[None, :] - WINDOW
            scores = gl.where(is_seen, scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 0))
            base = new_top
            if T > 1 or WINDOW is not None:
                # A row may see nothing of a tile: -inf less -inf is no number.
                base = gl.where(new_top == float("-inf"), 0.0, new_top)
            p = gl.exp2(scores - base[None, :])
            shrink = gl.exp2(top - base)
            totals = totals * shrink[None, :] + p
            top = new_top
            weights.permute((1, 0)).store(p.to(dtype))
            if end - token < TILE:
                # What lies behind may be no number, which no weight of 0 hides.
                v = value_tiles.index(slot).load(v_layout)
                is_there = (token + v_tokens < end)[:, None]
                value_tiles.index(slot).store(gl.where(is_there, v, 0.0).to(dtype))
            fence_async_shared()
            acc = warpgroup_mma(
                value_tiles.index(slot).permute((1, 0)),
                weights.permute((1, 0)),
                acc * shrink[None, :],
            )
            gl.thread_barrier()
            mbarrier.arrive(empty.index(slot))
            slot += 1
            if slot == NUM_STAGES:
                slot = 0
                phase ^= 1

        total = gl.sum(totals, 0)
        total = gl.where(total > 0.0, total, 1.0)
        out = acc / total[None, :]
        is_row = rows < GT
        if num_pieces == 1:
            index = (sequence * T + rows // G).to(gl.int64) * out_stride
            gl.store(
                out_ptr + (index + (head * G + rows % G) * D)[None, :] + offs_d[:, None],
                out.to(out_ptr.dtype.element_ty),
                mask=is_row[None, :] & (offs_d < D)[:, None],
            )
        else:
            whole = (sequence * J + head).to(gl.int64) * max_splits * GT
            part = whole + piece * GT + rows
            gl.store(
                partials_ptr + part[None, :] * D + offs_d[:, None],
                out,
                mask=is_row[None, :] & (offs_d < D)[:, None],
            )
            gl.store(log_sums_ptr + part, top + gl.log2(total), mask=is_row)
            # All threads' stores come before the one that counts, and before who reads the count.
            gl.thread_barrier()
            arrival_ptr = arrivals_ptr + sequence * J + head
            arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
            if arrived == num_pieces - 1:
                gl.thread_barrier()
                merge_arrived(
                    partials_ptr, log_sums_ptr, out_ptr, out_stride, whole, num_pieces, sequence,
                    head, GT, T, D, MERGE_ROWS, num_warps,
                )  # fmt: skip
                gl.store(arrival_ptr, 0)
        place += num_units
        sequence, unit, units, length, origin, left = advance(
            sequence, unit, units, length, origin, left, num_units,
            lengths_ptr, T, UNIT, WINDOW,
        )  # fmt: skip


@gluon.jit
def _fill(
    keys_desc, values_desc, tables_ptr, lengths_ptr, table_stride, keys, values,
    full, empty, batch, team, num_teams, least_units, max_splits, column,
    T: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, UNIT: gl.constexpr,
    UNITS: gl.constexpr, NUM_STAGES: gl.constexpr, CHUNK: gl.constexpr, BATCH_PAD: gl.constexpr,
    WINDOW: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Fills the ring; one warp, so that nothing here waits for others."""
    _, _, sequence, unit, units, length, origin, left = find_share(
        lengths_ptr, batch, team, num_teams, least_units, max_splits, T, UNIT, WINDOW, BATCH_PAD,
        1,
    )  # fmt: skip
    first_sequence, first_unit, first_units, first_length, first_origin, first_left = (
        sequence, unit, units, length, origin, left,
    )  # fmt: skip
    count = count_units(units - unit, left, UNITS)
    token = origin + unit * UNIT
    blocks = _load_blocks(tables_ptr, table_stride, sequence, token, count, BLOCK_SIZE, UNIT)
    num_late = 0
    for stage in range(NUM_STAGES):
        is_wanted = count > 0
        if USE_PDL:
            is_late = gl.minimum(token + count * UNIT, length) > length - T
            num_late += (is_wanted & is_late).to(gl.int32)
            is_wanted &= gl.minimum(token + count * UNIT, length) <= length - T
        sequence, unit, units, length, origin, left = advance(
            sequence, unit, units, length, origin, left, count, lengths_ptr, T, UNIT, WINDOW
        )
        next_count = count_units(units - unit, left, UNITS)
        next_token = origin + unit * UNIT
        # Ids of the next tile are on their way while this one is asked for.
        next_blocks = _load_blocks(
            tables_ptr, table_stride, sequence, next_token, next_count, BLOCK_SIZE, UNIT
        )
        _request(
            keys_desc, values_desc, keys, values, full, stage, blocks, token, count, is_wanted,
            column, BLOCK_SIZE, UNIT, UNITS, D, CHUNK,
        )  # fmt: skip
        count, token, blocks = next_count, next_token, next_blocks
    if USE_PDL:
        gdc_wait()
        if num_late > 0:
            l_sequence, l_unit, l_units, l_length, l_origin, l_left = (
                first_sequence, first_unit, first_units, first_length, first_origin, first_left,
            )  # fmt: skip
            for stage in range(NUM_STAGES):
                l_count = count_units(l_units - l_unit, l_left, UNITS)
                l_token = l_origin + l_unit * UNIT
                is_late = gl.minimum(l_token + l_count * UNIT, l_length) > l_length - T
                l_blocks = _load_blocks(
                    tables_ptr, table_stride, l_sequence, l_token, l_count, BLOCK_SIZE, UNIT
                )
                _request(
                    keys_desc, values_desc, keys, values, full, stage, l_blocks, l_token, l_count,
                    is_late & (l_count > 0), column, BLOCK_SIZE, UNIT, UNITS, D, CHUNK,
                )  # fmt: skip
                l_sequence, l_unit, l_units, l_length, l_origin, l_left = advance(
                    l_sequence, l_unit, l_units, l_length, l_origin, l_left, l_count,
                    lengths_ptr, T, UNIT, WINDOW,
                )  # fmt: skip
    slot = 0
    phase = 0
    while count > 0:
        mbarrier.wait(empty.index(slot), phase)
        _request(
            keys_desc, values_desc, keys, values, full, slot, blocks, token, count, count > 0,
            column, BLOCK_SIZE, UNIT, UNITS, D, CHUNK,
        )  # fmt: skip
        sequence, unit, units, length, origin, left = advance(
            sequence, unit, units, length, origin, left, count, lengths_ptr, T, UNIT, WINDOW
        )
        count = count_units(units - unit, left, UNITS)
        token = origin + unit * UNIT
        blocks = _load_blocks(tables_ptr, table_stride, sequence, token, count, BLOCK_SIZE, UNIT)
        slot += 1
        if slot == NUM_STAGES:
            slot = 0
            phase ^= 1


@gluon.jit(do_not_specialize=["table_stride", "batch", "least_units", "max_splits"])
def streamed_decode_kernel(
    keys_desc,
    values_desc,
    q_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    partials_ptr,
    log_sums_ptr,
    arrivals_ptr,
    q_stride,
    table_stride,
    out_stride,
    batch,
    least_units,
    max_splits,
    scale,
    J: gl.constexpr,
    GT: gl.constexpr,
    T: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    MERGE_ROWS: gl.constexpr,
    BATCH_PAD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    TILE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    USE_PDL: gl.constexpr,
    WORKER_REGS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes one program's pieces."""
    if USE_PDL:
        gdc_launch_dependents()
    UNITS: gl.constexpr = TILE // UNIT
    CHUNK: gl.constexpr = 64
    dtype: gl.constexpr = keys_desc.dtype
    team = gl.program_id(0) // J
    num_teams = gl.num_programs(0) // J
    head = gl.program_id(0) % J

    ring: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    places: gl.constexpr = NUM_STAGES * (D // CHUNK) * UNITS
    keys = gl.allocate_shared_memory(dtype, [places, UNIT, CHUNK], ring)
    values = gl.allocate_shared_memory(dtype, [places, UNIT, CHUNK], ring)
    key_tiles = keys._reinterpret(dtype, [NUM_STAGES, TILE, D], ring)
    value_tiles = values._reinterpret(dtype, [NUM_STAGES, TILE, D], ring)
    queries = gl.allocate_shared_memory(dtype, [ROWS, D], ring)
    weights = gl.allocate_shared_memory(dtype, [ROWS, TILE], ring)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=UNITS)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr, lengths_ptr, out_ptr, partials_ptr, log_sums_ptr, arrivals_ptr,
                    q_stride, out_stride, max_splits, scale, key_tiles, value_tiles, queries,
                    weights, full, empty, batch, team, num_teams, least_units, head,
                    J, GT, T, D, ROWS, MERGE_ROWS, UNIT, TILE, NUM_STAGES, BATCH_PAD, WINDOW,
                    SOFT_CAP, USE_PDL, num_warps,
                ),
            ),
            (
                _fill,
                (
                    keys_desc, values_desc, tables_ptr, lengths_ptr, table_stride, keys, values,
                    full, empty, batch, team, num_teams, least_units, max_splits, head * D,
                    T, D, BLOCK_SIZE, UNIT, UNITS, NUM_STAGES, CHUNK, BATCH_PAD, WINDOW, USE_PDL,
                ),
            ),
        ],
        [1],
        [WORKER_REGS],
    )  # fmt: skip
