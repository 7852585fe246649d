"""Compiles the streamed kernel for sm_90 without a device; prints PTX by name as JSON.

A process of its own: the interpreter that other tests run kernels in leaves Triton's language
patched, and then nothing compiles.
"""

import json
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pdserve.kernels.copy_engine import MIN_BULK_ROWS
from pdserve.kernels.streamed_product import streamed_product_kernel

INTEGERS = (
    "num_rows",
    "num_outputs",
    "num_splits",
    "num_k_blocks",
    "num_m_tiles",
    "num_units",
)
MAX_SHARED_BYTES = 227 * 1024


def compile_kernel(
    block_n: int,
    block_m: int,
    block_k: int,
    num_stages: int,
    num_warps: int,
    use_pdl: bool,
    is_gated: bool = False,
) -> str:
    """Returns the PTX, after ptxas has accepted it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    constants = {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "NUM_STAGES": num_stages,
        "IS_GATED": is_gated,
        "HAS_BULK_STORE": block_m >= MIN_BULK_ROWS,
        "USE_PDL": use_pdl,
        "num_warps": num_warps,
    }
    out_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    signature = {
        "weight_desc": f"tensordesc<bf16[{block_n},{block_k}],{layout!r}>",
        "x_desc": f"tensordesc<bf16[{block_m},{block_k}],{layout!r}>",
        "out_desc": f"tensordesc<fp32[1,{block_m},{block_n}],{out_layout!r}>",
        "out_ptr": "*fp32",
        **dict.fromkeys(INTEGERS, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    assert list(signature) == streamed_product_kernel.arg_names
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        GluonASTSource(streamed_product_kernel, signature, places),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "launch_pdl": use_pdl},
    )
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        # an assembly of an earlier run proves nothing about the kernel of today
        triton.knobs.cache.dir = cache
        kernels = json.loads(sys.argv[1])
        print(json.dumps({name: compile_kernel(*cut) for name, cut in kernels.items()}))
