"""Small-batch products against their floor: a sweep of plans, then the chain of a decode step.

    python -m benchmarks.kernels.product --json product.json

Needs a CUDA device with 20 GB free. The shapes are those of Llama-3-8B.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.product_candidates import LLAMA_8B, Shape, describe, list_candidates
from benchmarks.kernels.product_timing import (
    WEIGHT_SCALE,
    Chain,
    Plan,
    make_out,
    multiply,
    time_product,
)
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_table import LayerShape
from pdserve.kernels.product_timer import make_product_table

BYTES_PER_S = 4.55e12  # measured read bandwidth of an H200
FLOPS_PER_S = 780e12  # measured, bf16
NUM_LAYERS = 32
ROWS = (1, 8, 16, 32, 64, 128, 256)
NUM_COMPILE_THREADS = 16


class Sweep:
    """Times plans until its time is over; keeps every figure."""

    def __init__(self, weights: dict[str, list[Tensor]]) -> None:
        self.weights = weights
        self.us: dict[tuple[str, int, Plan, bool], float] = {}
        self.failed: dict[str, str] = {}

    def compile(self, wanted: list[tuple[Shape, int, ProductPlan, bool]]) -> None:
        """Compiles kernels side by side, by running each once on a small shape."""

        def run(item: tuple[int, ProductPlan, bool, bool]) -> None:
            num_rows, plan, use_pdl, is_split = item
            small = Shape(name="", num_outputs=1024, num_inputs=plan.block_k * 8)
            tiny = ProductPlan(
                **{**plan.to_json(), "num_splits": 2 if is_split else 1}  # type: ignore[arg-type]
            )
            weight = torch.zeros(
                small.num_outputs, small.num_inputs, device="cuda", dtype=torch.bfloat16
            )
            x = torch.zeros(num_rows, small.num_inputs, device="cuda", dtype=torch.bfloat16)
            try:
                multiply(x, weight, make_out(num_rows, small, tiny), tiny, use_pdl)
            except Exception as error:  # noqa: BLE001  # one bad variant must not end the run
                self.failed[f"{describe(plan)} M{num_rows}"] = repr(error)[:200]

        items = {
            (
                num_rows,
                ProductPlan(
                    **{  # type: ignore[arg-type]
                        **plan.to_json(),
                        "num_splits": 1,
                        "programs_per_sm": None,
                    }
                ),
                use_pdl,
                plan.num_splits > 1,
            )
            for _, num_rows, plan, use_pdl in wanted
        }
        # The first launch of a kernel sets up what all its variants share: not side by side.
        for item in {plan.kernel: (rows, plan, *rest) for rows, plan, *rest in items}.values():
            run(item)
        with ThreadPoolExecutor(NUM_COMPILE_THREADS) as pool:
            list(pool.map(run, items))
        torch.cuda.synchronize()

    def measure(self, shape: Shape, num_rows: int, plan: Plan, use_pdl: bool) -> None:
        """Times one plan on one shape; a failure is kept in `failed`."""
        key = (shape.name, num_rows, plan, use_pdl)
        if key in self.us:
            return
        try:
            self.us[key] = time_product(
                num_rows, shape, self.weights[shape.name], plan, use_pdl=use_pdl
            )
        except Exception as error:  # noqa: BLE001  # one bad variant must not end the run
            self.failed[f"{shape.name} {describe(plan)} M{num_rows}"] = repr(error)[:200]

    def rank(self, shape: Shape, num_rows: int, use_pdl: bool) -> list[tuple[float, Plan]]:
        """Returns (microseconds with what the consumer pays for partial sums, plan), best first."""
        ranked = []
        for (name, rows, plan, with_pdl), us in self.us.items():
            if (name, rows, with_pdl) != (shape.name, num_rows, use_pdl):
                continue
            sums_bytes = 4 * num_rows * shape.num_outputs
            extra = 0 if plan is None or plan.num_splits == 1 else plan.num_splits * sums_bytes
            ranked.append((us + extra / BYTES_PER_S * 1e6, plan))
        return sorted(ranked, key=lambda pair: pair[0])


def make_weights() -> dict[str, list[Tensor]]:
    """Returns the weights of all layers and two heads."""
    return {
        shape.name: [
            torch.empty(
                shape.num_outputs, shape.num_inputs, device="cuda", dtype=torch.bfloat16
            ).normal_(std=WEIGHT_SCALE)
            for _ in range(2 if shape.name == "lm_head" else NUM_LAYERS)
        ]
        for shape in LLAMA_8B
    }


def check_kernels() -> set[str]:
    """Runs the correctness checks, each in its own process; returns the kernels that passed."""
    processes = {
        kernel: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.product_checks", kernel],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for kernel in ("streamed", "tiled", "row")
    }
    passed = set()
    for kernel, process in processes.items():
        try:
            output, _ = process.communicate(timeout=50)
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"{kernel}: HANGS " + process.communicate()[0]
        print(output.strip()[-700:], flush=True)
        if process.returncode == 0:
            passed.add(kernel)
    return passed


def sweep_shapes(sweep: Sweep, kernels: set[str], budget_s: float) -> None:
    """Times all candidates without PDL, then the best of them with it."""
    wanted = [
        (shape, num_rows, plan, False)
        for num_rows in ROWS
        for shape in LLAMA_8B
        for plan in list_candidates(shape, num_rows, streamed="streamed" in kernels)
        if plan.kernel in kernels
    ]
    begin = time.monotonic()
    sweep.compile(wanted)
    print(f"compiled in {time.monotonic() - begin:.1f} s", flush=True)
    begin = time.monotonic()
    for num_rows in ROWS:
        for shape in LLAMA_8B:
            sweep.measure(shape, num_rows, None, False)
    # A budget that runs out shall cost every shape some plans, not one shape all of them.
    random.Random(0).shuffle(wanted)
    for shape, num_rows, plan, use_pdl in wanted:
        if time.monotonic() - begin < budget_s:
            sweep.measure(shape, num_rows, plan, use_pdl)
    finalists = [
        (shape, num_rows, plan, True)
        for num_rows in ROWS
        for shape in LLAMA_8B
        for _, plan in [pair for pair in sweep.rank(shape, num_rows, False) if pair[1] is not None][
            :6
        ]
        if plan is not None
    ]
    sweep.compile(finalists)
    for shape, num_rows, plan, use_pdl in finalists:
        sweep.measure(shape, num_rows, plan, use_pdl)
    print(f"{len(sweep.us)} timings in {time.monotonic() - begin:.1f} s", flush=True)


def tune_chain(sweep: Sweep, chain: Chain, num_rows: int) -> dict[str, object]:
    """Times the chain with torch and with our plans, then changes one plan at a time for better."""
    row: dict[str, object] = {"num_rows": num_rows}
    torch_plans: dict[str, Plan] = dict.fromkeys((shape.name for shape in chain.shapes), None)
    row["torch_ms"] = chain.time(num_rows, torch_plans, use_pdl=False)
    plans = {shape.name: sweep.rank(shape, num_rows, False)[0][1] for shape in chain.shapes}
    row["without_pdl_ms"] = chain.time(num_rows, plans, use_pdl=False)
    finalists = {
        shape.name: [plan for _, plan in sweep.rank(shape, num_rows, True)[:6]]
        for shape in chain.shapes
    }
    plans = {name: ranked[0] for name, ranked in finalists.items()}
    row["pdl_ms"] = chain.time(num_rows, plans, use_pdl=True)
    row["tuned_ms"], plans = improve(chain, num_rows, plans, finalists)
    row["plans"] = plans
    return row


def improve(
    chain: Chain,
    num_rows: int,
    plans: dict[str, Plan],
    finalists: dict[str, list[Plan]],
) -> tuple[float, dict[str, Plan]]:
    """Changes one plan of the chain at a time for better; returns milliseconds and plans."""
    best_ms = chain.time(num_rows, plans, use_pdl=True)
    for shape in chain.shapes:
        for plan in (*finalists[shape.name], None):
            changed = {**plans, shape.name: plan}
            milliseconds = chain.time(num_rows, changed, use_pdl=True)
            if milliseconds < best_ms * 0.998:
                best_ms, plans = milliseconds, changed
    return best_ms, plans


def report(sweep: Sweep, chains: list[dict[str, object]], chain: Chain) -> None:
    """Prints the tables."""
    for text, error in list(sweep.failed.items())[:6]:
        print("FAILED", text, error[:150])
    print("us (% of floor): torch | best alone | best with PDL")
    for shape in LLAMA_8B:
        for num_rows in ROWS:
            floor = shape.floor_us(num_rows, BYTES_PER_S, FLOPS_PER_S)
            cells = []
            for ranked in (
                [(sweep.us.get((shape.name, num_rows, None, False), float("nan")), None)],
                [pair for pair in sweep.rank(shape, num_rows, False) if pair[1]][:1],
                sweep.rank(shape, num_rows, True)[:1],
            ):
                for us, plan in ranked:
                    cells.append(f"{us:.1f} {100 * us / floor:.0f}% {describe(plan)}")
            print(f"{shape.name} M{num_rows} {floor:.1f}:", " | ".join(cells))
    floor_ms = sum(
        NUM_LAYERS * shape.floor_us(1, BYTES_PER_S, FLOPS_PER_S) for shape in chain.shapes
    )
    print(f"chain ms (floor of the bytes {floor_ms / 1000:.2f})")
    for row in chains:
        plans = row["plans"]
        assert isinstance(plans, dict)
        times = " ".join(f"{key[:-3]} {value:.3f}" for key, value in row.items() if "_ms" in key)
        print(f"M{row['num_rows']}: {times}", *(describe(plan) for plan in plans.values()))


def main() -> None:
    """Runs the sweep and the chain, prints the tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="every figure")
    parser.add_argument("--budget", type=float, default=55.0, help="seconds of the sweep")
    arguments = parser.parse_args()
    kernels = check_kernels()
    sweep = Sweep(make_weights())
    sweep_shapes(sweep, kernels, arguments.budget)
    chain = Chain(shapes=LLAMA_8B[:4], weights=sweep.weights)
    chains = []
    for num_rows in ROWS:
        try:
            chains.append(tune_chain(sweep, chain, num_rows))
        except Exception as error:  # noqa: BLE001  # the other batch sizes still count
            print(f"chain of {num_rows} rows failed: {error!r}"[:300], flush=True)
    arguments.json.write_text(
        json.dumps(
            {
                "products": [
                    {
                        "shape": name,
                        "num_rows": num_rows,
                        "us": us,
                        "use_pdl": use_pdl,
                        "plan": plan and plan.to_json(),
                    }
                    for (name, num_rows, plan, use_pdl), us in sweep.us.items()
                ],
                "chains": chains,
                "failed": sweep.failed,
            },
            default=lambda plan: plan.to_json(),
            indent=1,
        )
    )
    report(sweep, chains, chain)
    for attempt in ("cold", "warm"):
        begin = time.monotonic()
        table = make_product_table(
            {shape.layer: (sweep.weights[shape.name]) for shape in LLAMA_8B},
            head=LayerShape(num_outputs=128256, num_inputs=4096),
            use_pdl=True,
            cache=None,
            is_deterministic=False,
        )
        print(f"table, {attempt}: {time.monotonic() - begin:.1f} s")
    print(table.describe())


if __name__ == "__main__":
    main()
