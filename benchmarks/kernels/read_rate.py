"""What this card's memory gives to a kernel that does nothing but read."""

import torch
import triton
import triton.language as tl

from benchmarks.kernels.paged import time_calls

NUM_BYTES = 2 << 30
PROGRAMS = (264, 528, 1056, 2112)
BLOCK = 4096
"""Values of four bytes that a program asks for at once."""


@triton.jit
def _read_kernel(x_ptr, out_ptr, per_program, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, per_program, BLOCK):
        total += tl.load(x_ptr + program * per_program + begin + tl.arange(0, BLOCK))
    tl.store(out_ptr + program, tl.sum(total, axis=0))


def measure_read_rate() -> float:
    """Returns bytes a microsecond, of the best of a few cuts of 2 GiB."""
    values = torch.ones(NUM_BYTES // 4, dtype=torch.int32, device="cuda")
    best = 0.0
    for num_programs in PROGRAMS:
        per_program = values.numel() // num_programs // BLOCK * BLOCK
        out = torch.zeros(num_programs, dtype=torch.int32, device="cuda")

        def read(out: torch.Tensor = out, per_program: int = per_program) -> None:
            _read_kernel[(out.numel(),)](values, out, per_program, BLOCK=BLOCK, num_warps=8)

        us = time_calls([read])
        if not bool((out == per_program).all()):
            raise RuntimeError("the kernel has not read everything")
        best = max(best, 4 * per_program * num_programs / us)
    return best
