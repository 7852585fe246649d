"""Compiles Hopper's products for sm_90 without a device; prints PTX by name as JSON.

A process of its own: the interpreter that other tests run kernels in leaves Triton's language
patched, and then nothing compiles.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pdserve.kernels.shared_product import shared_product_kernel
from pdserve.kernels.streamed_product import streamed_product_kernel

MAX_SHARED_BYTES = 227 * 1024
KERNELS = {
    "streamed": (
        streamed_product_kernel,
        "fp32",
        {"out_ptr": "*fp32"},
        ("num_rows", "num_outputs", "num_splits", "num_k_blocks", "num_m_tiles", "num_units"),
    ),
    "shared": (
        shared_product_kernel,
        "bf16",
        {"out_ptr": "*bf16", "sums_ptr": "*fp32", "flags_ptr": "*i32"},
        ("num_rows", "num_outputs", "num_splits", "num_k_blocks", "num_m_tiles", "num_blocks"),
    ),
}


def compile_all(module: str, kernels: Mapping[str, Mapping[str, int | str]]) -> dict[str, str]:
    """Runs this module in a process of its own; returns PTX by name."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.hopper_ptx", module, json.dumps(kernels)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, str] = json.loads(run.stdout)
    return found


def compile_kernel(name: str, constants: Mapping[str, int]) -> str:
    """Returns the PTX, after ptxas has accepted it."""
    kernel, out_type, pointers, integers = KERNELS[name]
    block_n, block_m, block_k = (constants[f"BLOCK_{letter}"] for letter in "NMK")
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bits = {"bf16": 16, "fp32": 32}[out_type]
    out_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=3)
    signature = {
        "weight_desc": f"tensordesc<bf16[{block_n},{block_k}],{layout!r}>",
        "x_desc": f"tensordesc<bf16[{block_m},{block_k}],{layout!r}>",
        "out_desc": f"tensordesc<{out_type}[1,{block_m},{block_n}],{out_layout!r}>",
        **pointers,
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    assert list(signature) == kernel.arg_names
    places = {(list(signature).index(constant),): value for constant, value in constants.items()}
    compiled = triton.compile(
        GluonASTSource(kernel, signature, places),
        target=GPUTarget("cuda", 90, 32),
        options={
            "num_warps": constants["num_warps"],
            "launch_pdl": bool(constants["USE_PDL"]),
        },
    )
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        # an assembly of an earlier run proves nothing about the kernel of today
        triton.knobs.cache.dir = cache
        wanted = json.loads(sys.argv[2])
        print(json.dumps({name: compile_kernel(sys.argv[1], cut) for name, cut in wanted.items()}))
