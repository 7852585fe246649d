"""Plans of the products, chosen in the chain of a decode step, written as the default table.

    python -m benchmarks.kernels.product_chain --out many_rows.json
    python -m benchmarks.kernels.product_chain --merge a.json b.json --defaults table.json

Between the products run the kernels that read their results in a step (attention is left out),
with dependent launch, over the weights of all layers. Needs an H200 with 20 GB free.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.chain_candidates import list_candidates
from benchmarks.kernels.product_candidates import Shape, describe, share_shapes
from benchmarks.kernels.product_timing import Plan, fold
from pdserve.kernels.norm import add_norm
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import ROW_BUCKETS
from pdserve.kernels.product_timer import time_graph
from pdserve.kernels.silu_mul import silu_mul
from pdserve.kernels.small_product import small_product

NUM_LAYERS = 32
BUCKETS = (128, 256, 64, 32, 16, 8)


def is_gated(plan: Plan) -> bool:
    """Says whether a plan's product writes silu(gate) * up."""
    return plan is not None and plan.kernel == "gated"


class Bench:
    """The weights of all layers and what runs on them."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = shapes
        self._gain = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        self._weights = {
            shape.name: [
                torch.empty(
                    shape.num_outputs, shape.num_inputs, device="cuda", dtype=torch.bfloat16
                ).normal_(std=0.02)
                for _ in range(2 if shape.name == "lm_head" else NUM_LAYERS)
            ]
            for shape in shapes
        }

    def compile(self, items: list[tuple[Shape, int, ProductPlan]]) -> None:
        """Launches each kernel once, side by side."""

        def launch(item: tuple[Shape, int, ProductPlan]) -> None:
            shape, rows, plan = item
            try:
                x = torch.zeros(rows, shape.num_inputs, device="cuda", dtype=torch.bfloat16)
                self._multiply(x, shape, 0, self._make_out(shape, rows, plan), plan)
            except Exception as error:  # noqa: BLE001  # one bad variant must not end the run
                print(f"FAILED {shape.name} {rows} {describe(plan)} {error!r}"[:300], flush=True)

        unique = {
            (
                *(plan.block_n, plan.block_k, plan.num_stages, plan.num_warps),
                rows,
                plan.num_splits > 1 or shape.name == "lm_head",
                plan.kernel,
            ): (shape, rows, plan)
            for shape, rows, plan in items
        }
        # The first launch of a kernel sets up what all its variants share: not side by side.
        launch(items[0])
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(launch, unique.values()))
        torch.cuda.synchronize()

    def time_alone(self, shape: Shape, rows: int, plan: Plan) -> float:
        """Returns microseconds of a product, silu * up if it has any, and a small kernel."""
        x = torch.randn(rows, shape.num_inputs, device="cuda").bfloat16()
        behind = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)
        out = self._make_out(shape, rows, plan)
        num_launches = len(self._weights[shape.name])
        gates = shape.layer.is_gated and not is_gated(plan)
        inner = torch.empty(rows, shape.num_outputs // 2, device="cuda", dtype=torch.bfloat16)

        def launch() -> None:
            for layer in range(num_launches):
                self._multiply(x, shape, layer, out, plan)
                if gates:
                    silu_mul(out, inner, use_pdl=True)
                fold(inner.unsqueeze(0) if gates else out, behind, 0.01, True)

        return 1000 * time_graph(launch, 4) / num_launches

    def time_chain(self, rows: int, plans: dict[str, Plan], *, padded_rows: int = 0) -> float:
        """Returns milliseconds of all layers; rows may lie in larger buffers."""
        outs = [self._make_out(shape, rows, plans[shape.name]) for shape in self.shapes[:4]]
        xs = [
            torch.randn(max(rows, padded_rows), shape.num_inputs, device="cuda").bfloat16()[:rows]
            for shape in self.shapes[:4]
        ]
        residual = torch.randn(rows, 4096, device="cuda").bfloat16()
        outs[3].normal_()
        has_gate = is_gated(plans["gate_up"])
        if has_gate:
            outs[2] = xs[3].unsqueeze(0)

        def launch() -> None:
            for layer in range(NUM_LAYERS):
                for index, shape in enumerate(self.shapes[:4]):
                    before = outs[index - 1]
                    if shape.name in ("qkv", "gate_up"):
                        gain = self._gain
                        add_norm(before, residual, gain, xs[index], epsilon=1e-5, use_pdl=True)
                    elif shape.name == "down":
                        if not has_gate:
                            silu_mul(before, xs[index], use_pdl=True)
                    else:
                        fold(before, xs[index], 1.0, True)
                    self._multiply(xs[index], shape, layer, outs[index], plans[shape.name])

        return time_graph(launch, 5)

    def _make_out(self, shape: Shape, rows: int, plan: Plan) -> Tensor:
        splits = 1 if plan is None else plan.num_splits
        is_float = splits > 1 or shape.name == "lm_head"
        dtype = torch.float32 if is_float else torch.bfloat16
        num_outputs = shape.num_outputs // (2 if is_gated(plan) else 1)
        return torch.empty(splits, rows, num_outputs, device="cuda", dtype=dtype)

    def _multiply(self, x: Tensor, shape: Shape, layer: int, out: Tensor, plan: Plan) -> None:
        weight = self._weights[shape.name][layer]
        if plan is not None:
            small_product(x, weight, out, plan, use_pdl=True)
        elif out.dtype == torch.float32:
            torch.mm(x, weight.T, out_dtype=torch.float32, out=out[0])
        else:
            torch.mm(x, weight.T, out=out[0])


def check_kernel(timeout_s: float) -> None:
    """Runs the correctness checks in a process of their own.

    Raises:
        SystemExit: the kernel is wrong, or hangs.
    """
    for kernel in ("streamed", "gated"):
        command = [sys.executable, "-m", "benchmarks.kernels.product_checks", kernel]
        if subprocess.run(command, timeout=timeout_s, check=False).returncode != 0:
            raise SystemExit(f"the {kernel} kernel is wrong")


def tune(bench: Bench, rows: int, layers: Sequence[str]) -> dict[str, object]:
    """Ranks plans alone, then changes one plan of the chain at a time for better."""
    ranked: dict[str, list[tuple[float, Plan]]] = {}
    for shape in bench.shapes:
        timed: list[tuple[float, Plan]] = []
        for plan in (None, *list_candidates(shape, rows, layers)):
            try:
                timed.append((bench.time_alone(shape, rows, plan), plan))
            except Exception as error:  # noqa: BLE001  # one bad variant must not end the run
                print(f"FAILED {shape.name} {rows} {describe(plan)} {error!r}"[:300], flush=True)
        ranked[shape.name] = sorted(timed, key=lambda pair: pair[0])
        torch_us = next((us for us, plan in timed if plan is None), 0.0)
        best = [f"{describe(plan)} {us:.1f}" for us, plan in ranked[shape.name][:4]]
        floor = shape.floor_us(rows, 4.55e12, 780e12)
        print(f"M{rows} {shape.name} floor {floor:.1f} torch {torch_us:.1f}:", *best, flush=True)
    names = [shape.name for shape in bench.shapes[:4]]
    plans = {name: _best(ranked[name], not layers or name in layers) for name in names}
    best_ms = bench.time_chain(rows, plans)
    for name in (*names, *names[:2]):
        if layers and name not in layers:
            continue
        for _, plan in ranked[name][:10]:
            if plan == plans[name]:
                continue
            ms = bench.time_chain(rows, {**plans, name: plan})
            print(f"  {name} by {describe(plan)}: {ms:.3f} ms, best {best_ms:.3f}", flush=True)
            if ms < best_ms * 0.9985:
                best_ms, plans = ms, {**plans, name: plan}
    torch_ms = bench.time_chain(rows, dict.fromkeys(names))
    print(
        f"M{rows} chain {best_ms:.3f} (torch {torch_ms:.3f}):",
        *(describe(plans[name]) for name in names),
        flush=True,
    )
    for fewer in {128: (96,), 256: (192,)}.get(rows, ()):
        exact = bench.time_chain(fewer, plans)
        padded = bench.time_chain(fewer, plans, padded_rows=rows)
        print(f"M{fewer} chain {exact:.3f}, in buffers of {rows} rows {padded:.3f}", flush=True)
    plans["lm_head"] = _best(ranked["lm_head"], not layers or "lm_head" in layers)
    return {
        "rows": rows,
        "chain_ms": best_ms,
        "torch_ms": torch_ms,
        "plans": {name: plan and plan.to_json() for name, plan in plans.items()},
        "us": {
            name: [[us, describe(plan)] for us, plan in pairs] for name, pairs in ranked.items()
        },
    }


def _best(ranked: Sequence[tuple[float, Plan]], is_tuned: bool) -> Plan:
    """Returns the quickest plan; of a layer that keeps its own, that one."""
    if is_tuned:
        return ranked[0][1]
    return next((plan for _, plan in ranked if plan is not None), None)


def update_defaults(
    path: Path, shapes: Sequence[Shape], found: Sequence[dict[str, object]]
) -> None:
    """Puts the plans that were found into the default table.

    Fewer rows than were measured take the plan of the fewest; other numbers that were not measured
    stay as they are, or are left out: a start has to choose for them by itself.
    """
    table = json.loads(path.read_text())
    layers = {
        (layer["num_outputs"], layer["num_inputs"], layer["is_gated"]): layer
        for layer in table["layers"]
    }
    for shape in shapes:
        name = shape.name
        size = (shape.num_outputs, shape.num_inputs, shape.layer.is_gated)
        empty = {
            "num_outputs": size[0],
            "num_inputs": size[1],
            "is_gated": shape.layer.is_gated,
            "fixed": None,
            "rows": {},
        }
        layer = layers.setdefault(size, empty)
        for row in found:
            plans, us = row["plans"], row["us"]
            assert isinstance(plans, dict)
            assert isinstance(us, dict)
            plan = plans[name]
            label = describe(plan and ProductPlan.from_json(plan))
            times = {key: round(value, 1) for value, key in us[name]}
            layer["rows"][str(row["rows"])] = {
                "plan": plan,
                "us": times[label],
                "torch_us": times["torch"],
            }
        fewest = min(int(str(row["rows"])) for row in found)
        for rows in ROW_BUCKETS:
            if rows < fewest:
                layer["rows"][str(rows)] = layer["rows"][str(fewest)]
        layer["rows"] = dict(sorted(layer["rows"].items(), key=lambda item: int(item[0])))
    table["layers"] = [layers[size] for size in sorted(layers)]
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    """Checks, tunes every bucket, writes the figures and, if asked, the default table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="every figure; needed unless merging")
    parser.add_argument("--merge", type=Path, nargs="+", help="figures of runs, measured before")
    parser.add_argument("--rows", default=",".join(map(str, BUCKETS)), help="in this order")
    parser.add_argument("--defaults", type=Path, help="table to update")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--layers", default="", help="tuned; all of them by default")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds")
    arguments = parser.parse_args()
    begin = time.monotonic()
    shapes = share_shapes(arguments.tensor_parallel)
    if arguments.merge:
        found = [row for path in arguments.merge for row in json.loads(path.read_text())]
        update_defaults(arguments.defaults, shapes, found)
        return
    layers = [name for name in arguments.layers.split(",") if name]
    buckets = [int(rows) for rows in arguments.rows.split(",")]
    check_kernel(60)
    bench = Bench(shapes)
    bench.compile(
        [
            (shape, rows, plan)
            for rows in buckets
            for shape in shapes
            for plan in list_candidates(shape, rows, layers)
        ]
    )
    print(f"checked and compiled, {time.monotonic() - begin:.0f} s", flush=True)
    found = []
    for rows in buckets:
        if time.monotonic() - begin > arguments.budget:
            print(f"{rows} rows left out: no time")
            continue
        try:
            found.append(tune(bench, rows, layers))
        except Exception as error:  # noqa: BLE001  # the other batch sizes still count
            print(f"FAILED chain of {rows} rows: {error!r}"[:300], flush=True)
        arguments.out.write_text(json.dumps(found, indent=1))
    if arguments.defaults is not None:
        update_defaults(arguments.defaults, shapes, found)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
