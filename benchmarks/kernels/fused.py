"""Times the elementwise and sampling kernels in CUDA graphs and checks them against float64.

    python -m benchmarks.kernels.fused [--json PATH]

A row's `floor_us` is the bytes it must move at the measured copy bandwidth of an H200; below a few
microseconds a launch is bound by latency, and `us` is what one launch adds to a chain of them.
"""

import argparse
import json
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pdserve.kernels.embedding import embed_and_norm
from pdserve.kernels.norm import add_norm
from pdserve.kernels.rotary_store import rotate_and_store
from pdserve.kernels.sampling import sample_rows
from pdserve.kernels.sampling_state import DeviceSampling
from pdserve.kernels.silu_mul import silu_mul
from pdserve.request import SamplingParams
from pdserve.sampler import SamplingRow, sample

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
COPY_BYTES_PER_US = 4.2e6
READ_BYTES_PER_US = 4.55e6
ROWS = (1, 8, 64, 256, 8192)
CHAIN = 24
"""Launches in one graph."""
DEVICE = torch.device("cuda")
USE_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the table."""

    kernel: str
    rows: int
    us: float
    floor_us: float
    error: float | None = None
    """Relative, in the norm; for sampling the share of rows that differ from the CPU."""


def time_us(launch: Callable[[int], None], chain: int = CHAIN) -> float:
    """Returns microseconds a launch, the median over replays of a graph of a chain of them."""
    torch.cuda.synchronize()  # inputs are made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(3):
            launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(chain):
            launch(index)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / chain)
    return statistics.median(times[3:])


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def partials(num_splits: int, *shape: int) -> torch.Tensor:
    return randn(num_splits, *shape, dtype=torch.bfloat16 if num_splits == 1 else torch.float32)


def time_norm(num_rows: int, num_splits: int) -> Figure:
    x, residual = partials(num_splits, num_rows, HIDDEN), randn(num_rows, HIDDEN)
    gain, out = randn(HIDDEN), torch.full_like(residual, torch.nan)
    total = (residual.double() + x.double().sum(0)).to(residual.dtype).double()
    expected = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    add_norm(x, residual, gain, out, epsilon=1e-5)
    error = max(relative_error(out, expected), relative_error(residual, total))
    moved = x.nbytes + 3 * residual.nbytes
    us = time_us(lambda _: add_norm(x, residual, gain, out, epsilon=1e-5, use_pdl=USE_PDL))
    name = f"add_norm S={num_splits}"
    return Figure(
        kernel=name, rows=num_rows, us=us, floor_us=moved / COPY_BYTES_PER_US, error=error
    )


def time_embedding(num_rows: int, num_splits: int) -> Figure:
    del num_splits
    table, gain = randn(VOCAB, HIDDEN), randn(HIDDEN)
    ids = torch.randint(VOCAB, (num_rows,), device=DEVICE, dtype=torch.int32)
    residual, out = (torch.full_like(table[:num_rows], torch.nan) for _ in range(2))
    embed_and_norm(ids, table, residual, gain, out, epsilon=1e-5)
    wide = table[ids].double()
    expected = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    us = time_us(
        lambda _: embed_and_norm(ids, table, residual, gain, out, epsilon=1e-5, use_pdl=USE_PDL)
    )
    return Figure(
        kernel="embed_and_norm",
        rows=num_rows,
        us=us,
        floor_us=3 * out.nbytes / COPY_BYTES_PER_US,
        error=max(relative_error(out, expected), relative_error(residual, wide)),
    )


def time_silu(num_rows: int, num_splits: int) -> Figure:
    x = partials(num_splits, num_rows, 2 * INNER)
    out = torch.full((num_rows, INNER), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    silu_mul(x, out)
    gate, up = x.double().sum(0).chunk(2, dim=-1)
    error = relative_error(out, gate * gate.sigmoid() * up)
    us = time_us(lambda _: silu_mul(x, out, use_pdl=USE_PDL))
    floor = (x.nbytes + out.nbytes) / COPY_BYTES_PER_US
    return Figure(
        kernel=f"silu_mul S={num_splits}", rows=num_rows, us=us, floor_us=floor, error=error
    )


def time_rotary(num_rows: int, num_splits: int) -> Figure:
    x = partials(num_splits, num_rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    keys, values = (
        torch.full((2 * num_rows, KV_HEADS, HEAD_DIM), torch.nan, device=DEVICE).bfloat16()
        for _ in range(2)
    )
    slots = torch.randperm(2 * num_rows, device=DEVICE)[:num_rows].int()
    positions = torch.randint(8192, (num_rows,), device=DEVICE, dtype=torch.int32)
    inverse = 5e5 ** -(torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    angles = torch.outer(torch.arange(8192, device=DEVICE), inverse)
    cos, sin = angles.cos(), angles.sin()
    q = torch.full((num_rows, HEADS, HEAD_DIM), torch.nan, device=DEVICE).bfloat16()

    def launch(use_pdl: bool) -> None:
        rotate_and_store(
            x,
            positions,
            slots,
            cos,
            sin,
            keys,
            values,
            q,
            num_heads=HEADS,
            use_pdl=use_pdl,
        )

    launch(use_pdl=False)
    heads = x.double().sum(0).view(num_rows, -1, HEAD_DIM)
    first, second = heads[:, : HEADS + KV_HEADS].chunk(2, dim=-1)
    at_cos, at_sin = (part[positions].double()[:, None] for part in (cos, sin))
    turned = torch.cat((first * at_cos - second * at_sin, second * at_cos + first * at_sin), -1)
    got = torch.cat((q, keys[slots], values[slots]), dim=1)
    error = relative_error(got, torch.cat((turned, heads[:, HEADS + KV_HEADS :]), dim=1))
    us = time_us(lambda _: launch(USE_PDL))
    floor = (x.nbytes + got.nbytes) / COPY_BYTES_PER_US
    return Figure(
        kernel=f"rotate_and_store S={num_splits}",
        rows=num_rows,
        us=us,
        floor_us=floor,
        error=error,
    )


SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "top_k 50 top_p 0.9": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    "flat top_p 0.9": SamplingParams(temperature=3.0, top_p=0.9),
    "flat top_k 4000": SamplingParams(temperature=3.0, top_k=4000),
}


def time_sampling(name: str, num_rows: int, dtype: torch.dtype) -> Figure:
    params = SAMPLING[name]
    logits = [(randn(num_rows, VOCAB, dtype=torch.float32) * 2.5).to(dtype) for _ in range(2)]
    for part in logits:  # a few likely tokens, as a trained model has
        part[:, :: VOCAB // 40] += torch.linspace(3, 12, part[0, :: VOCAB // 40].shape[0]).to(part)
    rows = DeviceSampling(num_rows, VOCAB, DEVICE)
    host_rows = {
        index: SamplingRow(params=params, output_index=index % 7) for index in range(num_rows)
    }
    rows.write(host_rows)
    ids = torch.full((num_rows,), -7, dtype=torch.int32, device=DEVICE)
    logprobs = torch.full((num_rows,), torch.nan, device=DEVICE)
    sample_rows(logits[0], rows, ids, logprobs)
    some = range(0, num_rows, max(1, num_rows // 12))
    on_host = {index: logits[0][index].float().cpu() for index in some}
    wrong = [
        index for index in some if sample(on_host[index], host_rows[index]).token_id != ids[index]
    ]
    expected = logits[0].double().log_softmax(-1).gather(1, ids.long()[:, None])[:, 0]
    worst = float((logprobs - expected).abs().max())
    if not worst < 1e-4:
        raise AssertionError(f"log-probability off by {worst}")
    us = time_us(
        lambda index: sample_rows(logits[index % 2], rows, ids, logprobs, use_pdl=USE_PDL), chain=8
    )
    return Figure(
        kernel=f"{name} {str(dtype).removeprefix('torch.')}",
        rows=num_rows,
        us=us,
        floor_us=logits[0].nbytes / READ_BYTES_PER_US,
        error=len(wrong) / len(some),
    )


def measurements() -> Iterator[Callable[[], Figure]]:
    for num_rows in ROWS:
        for num_splits in (1, 4) if num_rows <= 256 else (1,):
            for measure in (time_norm, time_silu, time_rotary):
                yield lambda m=measure, r=num_rows, s=num_splits: m(r, s)  # type: ignore[misc]
        yield lambda r=num_rows: time_embedding(r, 1)  # type: ignore[misc]
    for dtype in (torch.bfloat16, torch.float32):
        for name in SAMPLING:
            for num_rows in (1, 8, 64, 256):
                yield lambda n=name, r=num_rows, d=dtype: time_sampling(n, r, d)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures: list[Figure] = []
    for measure in measurements():
        try:
            figures.append(measure())
        except Exception:  # noqa: BLE001 - one failing variant must not hide the others
            print(traceback.format_exc(limit=3)[-600:])
    table: dict[str, list[Figure]] = {}
    for figure in figures:
        table.setdefault(figure.kernel, []).append(figure)
    print("us (floor; error) at rows " + ", ".join(map(str, ROWS)))
    for kernel, line in table.items():
        cells = [f"{f.rows}: {f.us:.2f} ({f.floor_us:.1f}; {f.error:.1e})" for f in line]
        print(f"{kernel:28}", "  ".join(cells))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
