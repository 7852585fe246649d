"""The streamed kernel runs on Hopper alone; here it is compiled and its assembly is read."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pdserve.kernels.streamed_product import streamed_product_kernel

INTEGERS = (
    "num_rows",
    "num_outputs",
    "num_splits",
    "num_k_blocks",
    "num_m_tiles",
    "num_units",
)
NEXT_INTEGERS = (
    "next_outputs",
    "next_stride",
    "next_splits",
    "next_k_blocks",
    "next_block_k",
    "next_bytes",
    "next_first_program",
)


def compile_kernel(
    block_n: int,
    block_m: int,
    block_k: int,
    num_stages: int,
    num_warps: int,
    *,
    use_pdl: bool = False,
    has_next: bool = False,
) -> str:
    """Returns the PTX for sm_90, after ptxas has accepted it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    constants = {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "NUM_STAGES": num_stages,
        "USE_PDL": use_pdl,
        "HAS_NEXT": has_next,
        "num_warps": num_warps,
    }
    signature = {
        "weight_desc": f"tensordesc<bf16[{block_n},{block_k}],{layout!r}>",
        "x_desc": f"tensordesc<bf16[{block_m},{block_k}],{layout!r}>",
        "out_ptr": "*fp32",
        **dict.fromkeys(INTEGERS, "i32"),
        "next_weight_ptr": "*bf16",
        **dict.fromkeys(NEXT_INTEGERS, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        GluonASTSource(streamed_product_kernel, signature, places),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "launch_pdl": use_pdl},
    )
    assert compiled.metadata.shared <= 227 * 1024
    return str(compiled.asm["ptx"])


def find_lines(ptx: str, pattern: str) -> list[int]:
    return [number for number, line in enumerate(ptx.splitlines()) if re.search(pattern, line)]


@pytest.mark.parametrize(
    ("block_n", "block_m", "block_k", "num_stages", "num_warps"),
    [(64, 8, 128, 8, 4), (128, 64, 64, 8, 4), (256, 128, 64, 4, 8), (128, 256, 64, 4, 8)],
)
def test_few_rows_become_few_columns_of_the_tensor_core(
    block_n: int, block_m: int, block_k: int, num_stages: int, num_warps: int
) -> None:
    ptx = compile_kernel(block_n, block_m, block_k, num_stages, num_warps, use_pdl=False)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx)
    tiles = block_n // (16 * num_warps) * block_k // 16
    assert products == [str(block_m)] * tiles


def test_all_weights_of_the_ring_are_requested_before_the_wait_and_rows_only_after() -> None:
    ptx = compile_kernel(64, 16, 64, 6, 4, use_pdl=True)
    (wait,) = find_lines(ptx, r"griddepcontrol\.wait")
    copies = find_lines(ptx, r"cp\.async\.bulk\.tensor")
    # the ring's weights, then the ring's rows, then one of each in the loop
    assert len([line for line in copies if line < wait]) == 6
    assert len(copies) == 6 + 6 + 2
    stores = find_lines(ptx, r"st\.global")
    assert min(stores) > wait


def test_without_dependent_launch_no_grid_control_is_compiled_in() -> None:
    assert "griddepcontrol" not in compile_kernel(64, 16, 64, 6, 4, use_pdl=False)


def test_a_tile_is_overwritten_only_after_all_warps_have_read_it() -> None:
    ptx = compile_kernel(128, 16, 64, 4, 8, use_pdl=False).splitlines()
    loop_wait = next(
        number for number, line in enumerate(ptx) if re.search(r"wgmma\.wait_group\S* 1;", line)
    )
    behind = "\n".join(ptx[loop_wait:])
    assert behind.index("bar.sync") < behind.index("cp.async.bulk.tensor")


def test_the_next_weights_are_requested_into_l2_after_the_own_ring() -> None:
    ptx = compile_kernel(64, 16, 64, 6, 4, use_pdl=True, has_next=True)
    prefetches = find_lines(ptx, r"cp\.async\.bulk\.prefetch\.L2")
    (wait,) = find_lines(ptx, r"griddepcontrol\.wait")
    # one for a program whose weights all fit into the ring, one in the loop
    assert len(prefetches) == 2
    assert min(prefetches) > wait
    assert "prefetch" not in compile_kernel(64, 16, 64, 6, 4, use_pdl=True)
