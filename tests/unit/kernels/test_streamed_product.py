"""The streamed kernel runs on Hopper alone; here it is compiled and its assembly is read."""

import json
import os
import re
import subprocess
import sys

import pytest

# block_n, block_m, block_k, num_stages, num_warps, use_pdl, is_gated
KERNELS = {
    "one row": (64, 8, 128, 8, 4, False),
    "64 rows": (128, 64, 64, 8, 4, False),
    "128 rows": (256, 128, 64, 4, 8, False),
    "256 rows": (128, 256, 64, 4, 8, False),
    "dependent launch": (64, 16, 64, 6, 4, True),
    "gated, one row": (64, 8, 128, 3, 4, True, True),
    "gated, 128 rows": (64, 128, 64, 6, 4, True, True),
    "gated, 128 rows, wide": (128, 128, 64, 4, 8, True, True),
    "gated, 256 rows": (64, 256, 64, 4, 8, True, True),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.streamed_ptx", json.dumps(KERNELS)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    kernels: dict[str, str] = json.loads(run.stdout)
    return kernels


def find_lines(assembly: str, pattern: str) -> list[int]:
    lines = assembly.splitlines()
    return [number for number, line in enumerate(lines) if re.search(pattern, line)]


@pytest.mark.parametrize("name", ["one row", "64 rows", "128 rows", "256 rows"])
def test_few_rows_become_few_columns_of_the_tensor_core(ptx: dict[str, str], name: str) -> None:
    block_n, block_m, block_k, _, num_warps, *_ = KERNELS[name]
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx[name])
    assert products == [str(block_m)] * (block_n // (16 * num_warps) * block_k // 16)


@pytest.mark.parametrize(
    ("name", "columns"),
    [("gated, one row", 8), ("gated, 128 rows", 128), ("gated, 256 rows", 128)],
)
def test_a_gated_product_has_both_halves_of_an_output_in_one_thread(
    ptx: dict[str, str], name: str, columns: int
) -> None:
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx[name])
    assert products == [str(columns)] * (2 * KERNELS[name][2] // 16)
    # all sums of the gate have an exponential of theirs, and none goes through shared memory first
    behind = ptx[name][re.search(r"wgmma\.wait_group\S* 0;", ptx[name]).end() :]
    last = max(found.start() for found in re.finditer(r"ex2\.approx", behind))
    store = re.search(r"st\.(shared|global)|stmatrix", behind)
    assert store is not None
    assert store.start() > last


def test_a_gated_product_requests_two_tiles_of_weights_a_stage_before_the_wait(
    ptx: dict[str, str],
) -> None:
    assembly = ptx["gated, one row"]
    (wait,) = find_lines(assembly, r"griddepcontrol\.wait")
    copies = find_lines(assembly, r"cp\.async\.bulk\.tensor")
    assert len([line for line in copies if line < wait]) == 2 * KERNELS["gated, one row"][3]


def test_all_weights_of_the_ring_are_requested_before_the_wait_and_rows_only_after(
    ptx: dict[str, str],
) -> None:
    assembly = ptx["dependent launch"]
    num_stages = KERNELS["dependent launch"][3]
    (wait,) = find_lines(assembly, r"griddepcontrol\.wait")
    copies = find_lines(assembly, r"cp\.async\.bulk\.tensor")
    # the ring's weights, then the ring's rows, then one of each in the loop
    assert len([line for line in copies if line < wait]) == num_stages
    assert len(copies) == 2 * num_stages + 2
    assert min(find_lines(assembly, r"st\.global")) > wait


MANY_ROWS = ["64 rows", "128 rows", "256 rows", "gated, 128 rows", "gated, 256 rows"]


@pytest.mark.parametrize("name", MANY_ROWS)
def test_results_of_many_rows_leave_through_the_copy_engine_alone(
    ptx: dict[str, str], name: str
) -> None:
    assert "st.global" not in ptx[name]
    assert len(find_lines(ptx[name], r"cp\.async\.bulk\.tensor\.3d\.global")) >= 1


@pytest.mark.parametrize("name", MANY_ROWS)
def test_a_result_takes_the_place_of_the_ring_only_after_all_products_of_it(
    ptx: dict[str, str], name: str
) -> None:
    behind = ptx[name][re.search(r"wgmma\.wait_group\S* 0;", ptx[name]).end() :]
    place = re.search(r"st\.shared|stmatrix", behind).start()
    assert behind.index("bar.sync") < place
    assert place < behind.index("fence.proxy.async") < behind.index("cp.async.bulk.tensor.3d")


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
    outstanding = 2 if name.startswith("gated") else 1
    waiting = re.search(rf"wgmma\.wait_group\S* {outstanding};", ptx[name])
    assert waiting is not None
    behind = ptx[name][waiting.end() :]
    assert behind.index("bar.sync") < behind.index("cp.async.bulk.tensor")
