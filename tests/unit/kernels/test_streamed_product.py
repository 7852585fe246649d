"""The streamed kernel runs on Hopper alone; here it is compiled and its assembly is read."""

import re

import pytest

from tests.unit.kernels.hopper_ptx import compile_all


def cut(
    block_n: int, block_m: int, block_k: int, num_stages: int, num_warps: int, use_pdl: bool
) -> dict[str, int]:
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "NUM_STAGES": num_stages,
        "HAS_BULK_STORE": True,
        "USE_PDL": use_pdl,
        "num_warps": num_warps,
    }


KERNELS = {
    "one row": cut(64, 8, 128, 8, 4, False),
    "64 rows": cut(128, 64, 64, 8, 4, False),
    "128 rows": cut(256, 128, 64, 4, 8, False),
    "256 rows": cut(128, 256, 64, 4, 8, False),
    "dependent launch": cut(64, 16, 64, 6, 4, True),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return compile_all("streamed", KERNELS)


def find_lines(assembly: str, pattern: str) -> list[int]:
    lines = assembly.splitlines()
    return [number for number, line in enumerate(lines) if re.search(pattern, line)]


@pytest.mark.parametrize("name", ["one row", "64 rows", "128 rows", "256 rows"])
def test_few_rows_become_few_columns_of_the_tensor_core(ptx: dict[str, str], name: str) -> None:
    sizes = KERNELS[name]
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx[name])
    per_warp = sizes["BLOCK_N"] // (16 * sizes["num_warps"]) * sizes["BLOCK_K"] // 16
    assert products == [str(sizes["BLOCK_M"])] * per_warp


def test_all_weights_of_the_ring_are_requested_before_the_wait_and_rows_only_after(
    ptx: dict[str, str],
) -> None:
    assembly = ptx["dependent launch"]
    num_stages = KERNELS["dependent launch"]["NUM_STAGES"]
    (wait,) = find_lines(assembly, r"griddepcontrol\.wait")
    copies = find_lines(assembly, r"cp\.async\.bulk\.tensor\.2d\.shared")
    # the ring's weights, then the ring's rows, then one of each in the loop
    assert len([line for line in copies if line < wait]) == num_stages
    assert len(copies) == 2 * num_stages + 2
    assert min(find_lines(assembly, r"cp\.async\.bulk\.tensor\.3d\.global")) > wait


def test_results_leave_through_the_copy_engine_alone(ptx: dict[str, str]) -> None:
    assert all("st.global" not in assembly for assembly in ptx.values())


def test_dependents_are_launched_before_the_first_weights_are_requested(
    ptx: dict[str, str],
) -> None:
    (launch,) = find_lines(ptx["dependent launch"], r"griddepcontrol\.launch_dependents")
    assert launch < find_lines(ptx["dependent launch"], r"cp\.async\.bulk\.tensor")[0]


def test_without_dependent_launch_no_grid_control_is_compiled_in(ptx: dict[str, str]) -> None:
    assert "griddepcontrol" not in ptx["one row"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_tile_is_overwritten_only_after_all_warps_have_read_it(
    ptx: dict[str, str], name: str
) -> None:
    behind = ptx[name][re.search(r"wgmma\.wait_group\S* 1;", ptx[name]).end() :]
    assert behind.index("bar.sync") < behind.index("cp.async.bulk.tensor")
