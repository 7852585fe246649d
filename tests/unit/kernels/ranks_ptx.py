"""Compiles the kernels of tensor ranks for sm_90 without a device; prints PTX by name as JSON.

A process of its own, as for `streamed_ptx`.
"""

import json
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.all_gather import gather_kernel
from pdserve.kernels.all_reduce import ranks_norm_kernel
from pdserve.kernels.shared_choice import choose_in_share_kernel, join_shares_kernel
from pdserve.kernels.two_shot import two_shot_norm_kernel

ALIGNED = ("_stride", "num_columns", "sender_values")
"""Arguments that are multiples of 16 in a model."""
SUMS = {"RANK": 0, "NUM_RANKS": 2, "NUM_SPLITS": 4, "HAS_RESIDUAL": True, "IS_NARROW": True}
SUMS |= {"BLOCK_E": 4096, "USE_PDL": True}


def compile_kernel(
    kernel: object,
    types: dict[str, object],
    constants: dict[str, object],
    *,
    of_ones: bool = False,
) -> str:
    """Returns the PTX, after ptxas has accepted it.

    `of_ones`: all whole numbers are 1, which Triton compiles in where it may.
    """
    names = kernel.arg_names  # type: ignore[attr-defined]  # of a function of Triton's
    if of_ones:
        fixed = kernel.do_not_specialize  # type: ignore[attr-defined]
        plain = (one for one in names if one not in types and not one.endswith("_ptr"))
        constants = {**dict.fromkeys((one for one in plain if one not in fixed), 1), **constants}
    signature: dict[str, object] = {}
    places: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], object] = {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name], places[(index,)] = "constexpr", constants[name]
            continue
        kind = types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        signature[name] = kind
        if isinstance(kind, tuple):
            for part in range(len(kind)):
                attributes[(index, part)] = [["tt.divisibility", 16]]
        elif str(kind).startswith("*") or any(part in name for part in ALIGNED):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, places, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8, "launch_pdl": True},
    )
    return str(compiled.asm["ptx"])


def main() -> None:
    sums: dict[str, object] = {
        "x_ptr": "*fp32",
        "residual_ptr": "*bf16",
        "weight_ptr": "*bf16",
        "out_ptr": "*bf16",
        "rings": ("*i16", "*i16"),
        "epsilon": "fp32",
    }
    choice: dict[str, object] = {
        "logits_ptr": "*fp32",
        "fields_ptr": "*i64",
        "out_logprobs_ptr": "*fp32",
    }
    flags: dict[str, object] = {"HAS_RANDOM": True, "HAS_LOGPROBS": True, "USE_PDL": True}
    found = {
        "one row": compile_kernel(ranks_norm_kernel, sums, {**SUMS, "HAS_MORE_ROWS": False}),
        "many rows": compile_kernel(ranks_norm_kernel, sums, {**SUMS, "HAS_MORE_ROWS": True}),
        "two shots": compile_kernel(
            two_shot_norm_kernel, {**sums, "rings": ("*i16",) * 4}, {**SUMS, "NUM_RANKS": 4}
        ),
        **{
            name: compile_kernel(
                gather_kernel,
                {"rings": ("*i32", "*i32")},
                {"RANK": 1, "NUM_RANKS": 2, "BLOCK": 2048, "USE_PDL": True},
                of_ones=of_ones,
            )
            for name, of_ones in (("gather", False), ("gather of ones", True))
        },
        "choice": compile_kernel(choose_in_share_kernel, choice, {**flags, "BLOCK": 2048}),
        "join": compile_kernel(join_shares_kernel, choice, {**flags, "BLOCK_CHUNKS": 64}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        # an assembly of an earlier run proves nothing about the kernel of today
        triton.knobs.cache.dir = cache
        main()
