"""Products of 64 to 256 rows: candidates in the chain of a decode step, against their floor."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.kernels.product_candidates import LLAMA_8B, NUM_SMS, Shape, describe
from benchmarks.kernels.product_timing import Plan, fold, multiply
from pdserve.kernels.product_plan import ProductPlan
from pdserve.kernels.product_timer import time_graph
from pdserve.kernels.small_product import SharedSums, make_shared_sums, small_product

OUT = Path(os.environ.get("OUT", "."))
LAYERS = 32
T0 = time.monotonic()
# kernel, block_n, block_k, stages, warps
CUTS = {
    64: (
        ("streamed", 64, 128, 6, 4),
        ("streamed", 128, 128, 4, 4),
        ("shared", 256, 64, 5, 4),
        ("shared", 128, 64, 8, 4),
    ),
    128: (
        ("streamed", 64, 128, 4, 4),
        ("streamed", 128, 64, 6, 4),
        ("streamed", 256, 64, 4, 8),
        ("shared", 256, 64, 4, 8),
        ("shared", 128, 64, 6, 8),
        ("shared", 128, 64, 6, 4),
        ("shared", 128, 64, 3, 4),
        ("loader", 256, 64, 4, 8),
    ),
    256: (
        ("streamed", 64, 64, 5, 4),
        ("streamed", 128, 64, 4, 8),
        ("shared", 128, 64, 4, 8),
        ("shared", 256, 64, 4, 8),
        ("shared", 64, 64, 5, 4),
        ("loader", 128, 64, 4, 8),
    ),
}


def candidates(shape: Shape, rows: int, kernels: set[str]) -> list[ProductPlan]:
    bucket = next(b for b in CUTS if rows <= b)
    found = []
    for kernel, bn, bk, stages, warps in CUTS[bucket]:
        if kernel not in kernels:
            continue
        block_m = min(bucket, 32768 // bn)
        tiles = shape.num_outputs // bn * -(-bucket // block_m)
        per_sm = 2 if stages * (bn + block_m) * bk * 2 < 113 * 1024 else 1
        best = []
        for splits in (1, 2, 3, 4, 5, 8):
            units = tiles * splits
            slots = NUM_SMS * per_sm
            waves = -(-units // slots)
            efficiency = units / waves / slots
            if shape.name in ("gate_up", "lm_head") and splits > 1:
                continue
            if waves <= 2 or splits == 1:
                best.append((efficiency - 0.05 * splits, splits))
        best.sort(reverse=True)
        for _, splits in best[:2]:
            found.append(
                ProductPlan(
                    kernel=kernel,
                    num_splits=splits,
                    block_n=bn,
                    block_k=bk,
                    num_stages=stages,
                    num_warps=warps,
                )
            )
        if kernel != "streamed":
            found.append(
                ProductPlan(
                    kernel=kernel,
                    num_splits=1,
                    block_n=bn,
                    block_k=bk,
                    num_stages=stages,
                    num_warps=warps,
                    programs_per_sm=per_sm,
                )
            )
    return found


class Bench:
    def __init__(self) -> None:
        self.sums: SharedSums = make_shared_sums(torch.device("cuda", 0))
        self.weights = {
            s.name: [
                torch.empty(
                    s.num_outputs, s.num_inputs, device="cuda", dtype=torch.bfloat16
                ).normal_(std=0.02)
                for _ in range(3 if s.name == "lm_head" else LAYERS)
            ]
            for s in LLAMA_8B
        }

    def out(self, shape: Shape, rows: int, plan: Plan) -> torch.Tensor:
        splits = 1 if plan is None else plan.num_splits
        dtype = torch.float32 if splits > 1 or shape.name == "lm_head" else torch.bfloat16
        return torch.empty(splits, rows, shape.num_outputs, device="cuda", dtype=dtype)

    def multiply(self, x, weight, out, plan, pdl=True) -> None:
        if plan is None:
            if out.dtype == torch.float32:
                torch.mm(x, weight.T, out_dtype=torch.float32, out=out[0])
            else:
                torch.mm(x, weight.T, out=out[0])
        else:
            small_product(x, weight, out, plan, use_pdl=pdl, shared_sums=self.sums)

    def pair_us(self, shape: Shape, rows: int, plan: Plan) -> float:
        """One product and the small kernel that reads its result, over all layers."""
        x = torch.randn(rows, shape.num_inputs, device="cuda").bfloat16()
        back = torch.empty_like(x)
        out = self.out(shape, rows, plan)
        weights = self.weights[shape.name]

        def launch() -> None:
            for weight in weights:
                self.multiply(x, weight, out, plan)
                if shape.name != "lm_head":
                    width = min(shape.num_inputs, shape.num_outputs)
                    fold(out[:, :, :], back[:, :width], 0.01, True)

        return 1000 * time_graph(launch, 4) / len(weights)

    def chain_ms(self, rows: int, plans: dict[str, Plan]) -> float:
        shapes = LLAMA_8B[:4]
        outs = {s.name: self.out(s, rows, plans[s.name]).normal_() for s in shapes}
        xs = {s.name: torch.randn(rows, s.num_inputs, device="cuda").bfloat16() for s in shapes}

        def launch() -> None:
            previous = shapes[-1]
            for layer in range(LAYERS):
                for s in shapes:
                    scale = 1 / (0.02 * previous.num_inputs**0.5)
                    fold(outs[previous.name], xs[s.name], scale, True)
                    self.multiply(
                        xs[s.name], self.weights[s.name][layer], outs[s.name], plans[s.name]
                    )
                    previous = s

        return time_graph(launch, 5)

    def compile(self, items: list[tuple[Shape, int, ProductPlan]]) -> None:
        def once(item):
            shape, rows, plan = item
            try:
                x = torch.zeros(rows, shape.num_inputs, device="cuda", dtype=torch.bfloat16)
                self.multiply(x, self.weights[shape.name][0], self.out(shape, rows, plan), plan)
            except Exception as error:  # noqa: BLE001
                print("FAILED", shape.name, rows, plan.describe(), repr(error)[:200], flush=True)

        seen, unique = set(), []
        for shape, rows, plan in items:
            bucket = next(b for b in CUTS if rows <= b)
            dtype = plan.num_splits > 1 or shape.name == "lm_head"
            key = (
                plan.kernel,
                plan.block_n,
                plan.block_k,
                plan.num_stages,
                plan.num_warps,
                plan.programs_per_sm is None,
                bucket,
                dtype,
            )
            if key not in seen:
                seen.add(key)
                unique.append((shape, rows, plan))
        first = {plan.kernel: (shape, rows, plan) for shape, rows, plan in unique}
        for item in first.values():
            once(item)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(once, unique))
        torch.cuda.synchronize()
        print(f"{len(unique)} kernels compiled, {time.monotonic() - T0:.0f} s", flush=True)


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 140
    checks = {
        kernel: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.product_checks", kernel],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for kernel in ("shared", "loader")
    }
    bench = Bench()
    passed = {"streamed"}
    for kernel, process in checks.items():
        try:
            text, _ = process.communicate(timeout=max(5, 50 - (time.monotonic() - T0)))
        except subprocess.TimeoutExpired:
            process.kill()
            text = f"{kernel}: HANGS " + process.communicate()[0]
        print(text.strip()[-900:], flush=True)
        if process.returncode == 0:
            passed.add(kernel)
    print(f"checked, {time.monotonic() - T0:.0f} s", flush=True)
    order = (128, 256, 64)
    work = {(rows, s.name): candidates(s, rows, passed) for rows in order for s in LLAMA_8B}
    bench.compile([(s, rows, p) for rows in order for s in LLAMA_8B for p in work[rows, s.name]])
    result: dict[str, object] = {"pairs": [], "chains": []}
    for rows in order:
        ranked: dict[str, list] = {}
        for shape in LLAMA_8B:
            timed = []
            for plan in [None, *work[rows, shape.name]]:
                if time.monotonic() - T0 > limit:
                    break
                try:
                    us = bench.pair_us(shape, rows, plan)
                except Exception as error:  # noqa: BLE001
                    print("FAILED", shape.name, rows, describe(plan), repr(error)[:150])
                    continue
                timed.append((us, plan))
                result["pairs"].append(
                    {"rows": rows, "shape": shape.name, "us": us, "plan": plan and plan.to_json()}
                )
            timed.sort(key=lambda pair: pair[0])
            ranked[shape.name] = timed
            torch_us = next((us for us, plan in timed if plan is None), 0)
            floor = shape.floor_us(rows, 4.55e12, 780e12)
            print(
                f"M{rows} {shape.name} floor {floor:.1f} torch {torch_us:.1f}:",
                " ".join(f"{describe(p)} {us:.1f}" for us, p in timed[:5]),
                flush=True,
            )
        (OUT / "many_rows.json").write_text(json.dumps(result, indent=1))
        names = [s.name for s in LLAMA_8B[:4]]
        try:
            plans = {n: ranked[n][0][1] for n in names}
            torch_ms = bench.chain_ms(rows, dict.fromkeys(names))
            best = first = bench.chain_ms(rows, plans)
            for name in names:
                for _, plan in ranked[name][1:5]:
                    if time.monotonic() - T0 > limit + 8:
                        break
                    ms = bench.chain_ms(rows, {**plans, name: plan})
                    if ms < best * 0.998:
                        best, plans = ms, {**plans, name: plan}
            print(
                f"M{rows} chain torch {torch_ms:.3f} first {first:.3f} tuned {best:.3f}:",
                *(describe(plans[n]) for n in names),
                f"{time.monotonic() - T0:.0f} s",
                flush=True,
            )
            result["chains"].append(
                {
                    "rows": rows,
                    "torch_ms": torch_ms,
                    "ms": best,
                    "plans": {n: plans[n] and plans[n].to_json() for n in names},
                }
            )
            for other in {128: (96,), 256: (192,)}.get(rows, ()):
                ms = bench.chain_ms(other, plans)
                print(f"M{other} chain with these {ms:.3f}", flush=True)
        except Exception as error:  # noqa: BLE001
            print("FAILED chain", rows, repr(error)[:300], flush=True)
        (OUT / "many_rows.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
