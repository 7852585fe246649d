"""The shared kernel runs on Hopper alone; here it is compiled and its assembly is read."""

import re

import pytest

from tests.unit.kernels.hopper_ptx import compile_all


def cut(
    block_n: int, block_m: int, num_stages: int, num_warps: int, *, is_shared: bool
) -> dict[str, int]:
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": 64,
        "NUM_STAGES": num_stages,
        "HAS_BULK_STORE": True,
        "IS_SHARED": is_shared,
        "USE_PDL": True,
        "num_warps": num_warps,
    }


KERNELS = {
    "64 rows": cut(256, 64, 4, 4, is_shared=True),
    "128 rows": cut(256, 128, 3, 8, is_shared=True),
    "256 rows": cut(128, 256, 3, 8, is_shared=True),
    "splits": cut(128, 128, 6, 8, is_shared=False),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return compile_all("shared", KERNELS)


def find_lines(assembly: str, pattern: str) -> list[int]:
    lines = assembly.splitlines()
    return [number for number, line in enumerate(lines) if re.search(pattern, line)]


@pytest.mark.parametrize("name", KERNELS)
def test_the_wider_side_of_a_tile_is_the_second_operand(ptx: dict[str, str], name: str) -> None:
    sizes = KERNELS[name]
    narrow, wide = sorted((sizes["BLOCK_N"], sizes["BLOCK_M"]))
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx[name])
    assert products == [str(wide)] * (narrow // (16 * sizes["num_warps"]) * 4)


@pytest.mark.parametrize("name", KERNELS)
def test_only_weights_are_requested_before_the_wait(ptx: dict[str, str], name: str) -> None:
    assembly = ptx[name]
    num_stages = KERNELS[name]["NUM_STAGES"]
    (wait,) = find_lines(assembly, r"griddepcontrol\.wait")
    copies = find_lines(assembly, r"cp\.async\.bulk\.tensor\.2d\.shared")
    assert len([line for line in copies if line < wait]) == num_stages
    assert min(find_lines(assembly, r"st\.global|cp\.async\.bulk\.tensor\.3d")) > wait


@pytest.mark.parametrize("name", KERNELS)
def test_a_tile_is_overwritten_only_after_all_warps_have_read_it(
    ptx: dict[str, str], name: str
) -> None:
    for outstanding in (1, 0):
        behind = ptx[name][re.search(rf"wgmma\.wait_group\S* {outstanding};", ptx[name]).end() :]
        assert behind.index("bar.sync") < behind.index("cp.async.bulk.tensor")


@pytest.mark.parametrize("name", ["64 rows", "128 rows", "256 rows"])
def test_sums_are_announced_and_awaited_with_release_and_acquire(
    ptx: dict[str, str], name: str
) -> None:
    assert re.search(r"atom\.global\.acquire\.gpu\.cas", ptx[name])
    assert re.search(r"atom\.global\.gpu\.release\.exch", ptx[name])


def test_without_even_shares_nothing_is_awaited(ptx: dict[str, str]) -> None:
    assert "atom." not in ptx["splits"]
