"""Compiles the streamed decode kernel for sm_90 without a device; prints PTX by name as JSON.

A process of its own: the interpreter that other tests run kernels in leaves Triton's language
patched, and then nothing compiles.
"""

import json
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pdserve.kernels.streamed_decode import streamed_decode_kernel

POINTERS = {
    "q_ptr": "*bf16",
    "tables_ptr": "*i32",
    "lengths_ptr": "*i32",
    "out_ptr": "*bf16",
    "partials_ptr": "*fp32",
    "log_sums_ptr": "*fp32",
    "arrivals_ptr": "*i32",
}
INTEGERS = ("q_stride", "table_stride", "out_stride", "batch", "least_units", "max_splits")
MAX_SHARED_BYTES = 227 * 1024
TILE = 64
MAX_REGISTERS = 128


def compile_kernel(
    head_dim: int,
    rows: int,
    queries: int,
    block_size: int,
    num_stages: int,
    use_pdl: bool,
    batch_pad: int = 128,
) -> str:
    """Returns the PTX, after ptxas has accepted it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    unit = min(block_size, TILE)
    constants: dict[str, Any] = {
        "J": 8,
        "GT": rows,
        "T": queries,
        "D": head_dim,
        "ROWS": max(8, triton.next_power_of_2(rows)),
        "MERGE_ROWS": triton.next_power_of_2(rows),
        "BATCH_PAD": batch_pad,
        "BLOCK_SIZE": block_size,
        "UNIT": unit,
        "TILE": TILE,
        "NUM_STAGES": num_stages,
        "WINDOW": None,
        "SOFT_CAP": None,
        "USE_PDL": use_pdl,
        "WORKER_REGS": 40,
        "num_warps": 4,
    }
    descriptor = f"tensordesc<bf16[{unit},64],{layout!r}>"
    signature = {
        "keys_desc": descriptor,
        "values_desc": descriptor,
        **POINTERS,
        **dict.fromkeys(INTEGERS, "i32"),
        "scale": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        GluonASTSource(streamed_decode_kernel, signature, places),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "launch_pdl": use_pdl, "maxnreg": MAX_REGISTERS},
    )
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        # an assembly of an earlier run proves nothing about the kernel of today
        triton.knobs.cache.dir = cache
        kernels = json.loads(sys.argv[1])
        print(json.dumps({name: compile_kernel(*cut) for name, cut in kernels.items()}))
