"""Draws `results/gpu_engine.json` under the card's roofline: `python -m benchmarks.gpu_plot`."""

import argparse
import json
from pathlib import Path

from benchmarks.plots import plot_roofline
from benchmarks.report import RESULTS

READ_BYTES_PER_S = 4.55e12
FLOPS_PER_S = 780e12
PRODUCT_WEIGHTS = 7.505e9
"""Of layers and head, Llama-3-8B shape."""
KV_BYTES_PER_TOKEN = 131_072
ATTENTION_FLOPS = 4 * 4096 * 32
"""Of one query token and one KV token, over all layers."""


def work_of(bench: str, batch: int, prompt: int, cached: int) -> tuple[float, float]:
    """Returns floating-point operations and bytes that a row of the tables needs."""
    if bench == "decode":
        context = prompt + 64
        flops = batch * (2 * PRODUCT_WEIGHTS + ATTENTION_FLOPS * context)
        return flops, 2 * PRODUCT_WEIGHTS + batch * context * KV_BYTES_PER_TOKEN
    tokens = batch * prompt
    seen = tokens * (cached + prompt / 2)
    flops = 2 * PRODUCT_WEIGHTS * tokens + ATTENTION_FLOPS * seen
    return flops, 2 * PRODUCT_WEIGHTS + batch * (cached + prompt) * KV_BYTES_PER_TOKEN


def main() -> None:
    """Reads the rows and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=RESULTS / "gpu_engine.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_roofline.png")
    arguments = parser.parse_args()
    points: dict[str, list[tuple[float, float, str]]] = {"pdserve": [], "vLLM 0.26.0": []}
    for row in json.loads(arguments.rows.read_text())["rows"]:
        if row["bench"] not in ("decode", "prefill", "prefix"):
            continue
        cached = row.get("cached", 0)
        flops, num_bytes = work_of(row["bench"], row["batch"], row["prompt"], cached)
        size = f"{cached}+{row['prompt']}" if cached else str(row["prompt"])
        label = f"{row['bench']} {row['batch']} x {size}"
        for name, ms in (("pdserve", row["ms"]), ("vLLM 0.26.0", row["vllm_ms"])):
            points[name].append((flops / num_bytes, flops / ms / 1e9, label))
    plot_roofline(
        arguments.out, points, read_tb_per_s=READ_BYTES_PER_S / 1e12, tflop_per_s=FLOPS_PER_S / 1e12
    )


if __name__ == "__main__":
    main()
