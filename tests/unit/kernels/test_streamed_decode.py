"""The kernel runs on Hopper alone; here it is compiled and its assembly is read."""

import json
import os
import re
import subprocess
import sys

import pytest

# head_dim, rows, queries, block_size, num_stages, use_pdl, sequences that sums are made over
KERNELS = {
    "llama": (128, 4, 1, 16, 3, True),
    "one sequence": (128, 4, 1, 16, 3, True, 1),
    "four queries": (128, 16, 4, 32, 3, True),
    "small heads": (64, 1, 1, 64, 6, True),
    "large heads": (256, 2, 1, 16, 3, False),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.decode_ptx", json.dumps(KERNELS)],
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


@pytest.mark.parametrize("name", KERNELS)
def test_few_rows_become_few_columns_of_the_tensor_core(ptx: dict[str, str], name: str) -> None:
    head_dim, rows, *_ = KERNELS[name]
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", ptx[name])
    # scores of 64 tokens over the head, then the head's columns over 64 tokens
    assert products == [str(max(8, rows))] * (head_dim // 16 + head_dim // 64 * 4)


def test_the_ring_is_requested_before_the_wait_for_the_kernel_ahead(ptx: dict[str, str]) -> None:
    assembly = ptx["llama"]
    waits = find_lines(assembly, r"griddepcontrol\.wait")
    copies = find_lines(assembly, r"cp\.async\.bulk\.tensor")
    per_tile = 4 * 2 * 2  # blocks, halves of a head, keys and values
    assert len(copies) == 3 * per_tile
    # the last of them is in the part that fills the ring, the other in the one that attends
    assert len(waits) == 2
    assert len([line for line in copies if line < waits[1]]) == per_tile


def test_dependents_are_launched_before_the_first_tile_is_requested(ptx: dict[str, str]) -> None:
    (launch,) = find_lines(ptx["llama"], r"griddepcontrol\.launch_dependents")
    assert launch < find_lines(ptx["llama"], r"cp\.async\.bulk\.tensor")[0]


def test_without_dependent_launch_no_grid_control_is_compiled_in(ptx: dict[str, str]) -> None:
    assert "griddepcontrol" not in ptx["large heads"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_tile_is_given_back_only_after_all_warps_have_read_it(
    ptx: dict[str, str], name: str
) -> None:
    # from the wait for a product to the arrival, without another product between
    between = re.search(
        r"wgmma\.wait_group(?:(?!wgmma).)*?mbarrier\.arrive\.shared::cta", ptx[name], re.DOTALL
    )
    assert between is not None
    assert "bar.sync" in between.group()


@pytest.mark.parametrize("name", KERNELS)
def test_a_piece_is_counted_only_after_all_threads_have_stored_it(
    ptx: dict[str, str], name: str
) -> None:
    lines = ptx[name].splitlines()
    (count,) = find_lines(ptx[name], r"atom\.global\.gpu\.acq_rel\.add")
    before = [line for line in lines[:count] if "st.global" in line or "bar.sync" in line]
    assert "bar.sync" in before[-1]
    # and read by all of them only after it was counted
    assert any("bar.sync" in line for line in lines[count : count + 8])


def test_a_single_sequence_needs_no_sums_over_the_batch(ptx: dict[str, str]) -> None:
    one, many = (len(find_lines(ptx[name], r"shfl\.sync")) for name in ("one sequence", "llama"))
    # a scan and four sums, in the part that attends and in the one that fills the ring
    assert many - one >= 40
