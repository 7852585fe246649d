"""Whole clusters on GPUs over HTTP: two pools against colocated replicas, at the same loads.

`python -m benchmarks.gpu_serving [--modes 1P1D,colo1,colo2] [--rates idle,4,...,saturated]
[--seconds S] [--out FILE]`; needs two GPUs, under 8 minutes in all.

Llama-3-8B's shape, random bfloat16 weights, `pdserve serve --load-format dummy`. Prompts of 2048
token ids that nobody has cached, 128 output tokens, ignore_eos, one connection a request, Poisson
arrivals with the same seeds in every mode. The client is a process of its own. vLLM's figures were
measured on the same kind of machine with the same load: `pd` is its NIXL connector with one GPU for
prefill and one for decode, whose first token comes from the decode worker.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import RESULTS, write_gpu
from benchmarks.serving_cluster import LoadClient, LoadResult, loading, serving
from benchmarks.serving_figures import Figures, make_figures, queue_bound
from benchmarks.serving_load import Answered, LoadPoint
from benchmarks.serving_model import make_model_folder

PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 128
NUM_IDLE = 12
NUM_WARM = 3
SATURATING_PER_S = 26.0
MODES = {"1P1D": (1, 1), "colo1": (0, 1), "colo2": (0, 2)}
RATES = ("idle", "4", "8", "12", "16", "saturated")
SEEDS = {rate: 1000 * number for number, rate in enumerate(RATES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What vLLM 0.26.0 did at a load: TTFT p50 / p99, TPOT p50 / p99, requests done."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    done_per_s: float | None = None


VLLM_PD: Mapping[str, Reference] = {
    "idle": Reference(ttft_ms=(75, 77), tpot_ms=(4.8, 4.8)),
    "4": Reference(ttft_ms=(89, 150), tpot_ms=(5.1, 5.5)),
    "8": Reference(ttft_ms=(95, 376), tpot_ms=(5.3, 5.7)),
    "12": Reference(ttft_ms=(124, 549), tpot_ms=(5.6, 6.1)),
    "16": Reference(ttft_ms=(261, 729), tpot_ms=(7.4, 8.9)),
    "saturated": Reference(ttft_ms=(2394, 4638), tpot_ms=(6.8, 9.2), done_per_s=19.6),
}
"""Saturated: 24 offered."""
VLLM_COLO2: Mapping[str, Reference] = {
    "idle": Reference(ttft_ms=(53, 54), tpot_ms=(5.0, 5.0)),
    "4": Reference(ttft_ms=(57, 69), tpot_ms=(5.3, 6.4)),
    "8": Reference(ttft_ms=(59, 107), tpot_ms=(6.1, 8.9)),
    "12": Reference(ttft_ms=(60, 168), tpot_ms=(6.9, 9.6)),
    "16": Reference(ttft_ms=(62, 199), tpot_ms=(8.8, 12.7)),
}
VLLM = {"1P1D": VLLM_PD, "colo2": VLLM_COLO2, "colo1": {"idle": VLLM_COLO2["idle"]}}

Row = dict[str, object]


class Bench:
    """The rows of one run."""

    def __init__(self, seconds: float, rates: Sequence[str], save: Callable[[], None]) -> None:
        """Has measured nothing; `save` is called after each load point."""
        self._save = save
        self.rows: list[Row] = []
        self._seconds = seconds
        self._rates = rates
        self._figures: dict[tuple[str, str], Figures] = {}
        self._answered: dict[tuple[str, str], tuple[Answered, ...]] = {}
        self._row_of: dict[tuple[str, str], Row] = {}

    def measure(self, mode: str, folder: Path, flags: Sequence[str]) -> None:
        """Starts a cluster and runs all loads that make sense for it."""
        num_prefill, num_decode = MODES[mode]
        with (
            serving(folder, *flags, num_prefill=num_prefill, num_decode=num_decode) as served,
            loading(served) as client,
        ):
            self.rows.append({"bench": f"{mode} start", "s": served.seconds})
            print(f"{mode}: ready in {served.seconds:.1f} s", flush=True)
            try:
                client.run(self._point("idle", seed=7, num_requests=NUM_WARM))
                for rate in self._rates:
                    if mode == "colo1" and rate in ("12", "16", "saturated"):
                        continue  # one GPU is beyond its limit there
                    self._run(mode, rate, client)
            except BaseException:
                print("\n".join(served.lines[-40:]), flush=True)
                raise

    def _point(self, rate: str, *, seed: int, num_requests: int | None = None) -> LoadPoint:
        per_s = None if rate == "idle" else SATURATING_PER_S if rate == "saturated" else float(rate)
        if num_requests is None:
            num_requests = NUM_IDLE if per_s is None else round(per_s * self._seconds)
        return LoadPoint(
            num_requests=num_requests,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            rate_per_s=per_s,
            seed=seed,
        )

    def _run(self, mode: str, rate: str, client: LoadClient) -> None:
        result = client.run(self._point(rate, seed=SEEDS[rate]))
        figures = make_figures(result.answered, OUTPUT_TOKENS)
        self._figures[mode, rate] = figures
        self._answered[mode, rate] = result.answered
        row = self._row_of[mode, rate] = self._online_row(mode, rate, figures, result)
        self.rows.append(row)
        print(describe(mode, rate, figures), flush=True)
        self._save()

    def _online_row(self, mode: str, rate: str, found: Figures, result: LoadResult) -> Row:
        row: Row = {
            "bench": "online 2048/128 over HTTP",
            "mode": mode,
            "offered": rate,
            **asdict(found),
            "client_cpu_us_per_token": 1e6 * result.client_cpu_s / result.num_tokens,
            "cpu_share": {role: used / result.seconds for role, used in result.cpu_s.items()},
            "errors": sorted({one.error for one in result.answered if one.error})[:3],
        }
        theirs = VLLM[mode].get(rate)
        if theirs is not None:
            row["vllm"] = asdict(theirs)
        if mode == "1P1D" and theirs is not None and rate != "saturated":
            row["holds"] = found.num_failed == 0 and is_better(found, theirs)
        return row

    def add_bounds(self) -> None:
        """Holds 1P1D's rows against the bound from queueing, once all that it needs is known."""
        idle, full = self._figures.get(("1P1D", "idle")), self._figures.get(("1P1D", "saturated"))
        if idle is None or full is None or not full.done_per_s:
            return
        # At its limit a prefill GPU is busy all the time.
        service_s, idle_ttft_s = 1 / full.done_per_s, idle.ttft.p50_ms / 1e3
        for (mode, rate), found in self._figures.items():
            if mode != "1P1D" or rate in ("idle", "saturated"):
                continue
            answered = self._answered[mode, rate]
            bound = queue_bound(answered, service_s=service_s, idle_ttft_s=idle_ttft_s)
            aims = {"ttft_p50_ms": 1.15 * bound.p50_ms, "tpot_p99_ms": 1.1 * found.step_ms}
            ttft_ms, tpot_ms = found.ttft.p50_ms, found.tpot.p99_ms
            self._row_of[mode, rate] |= {
                "queue_bound": asdict(bound) | {"service_ms": 1e3 * service_s},
                "aim": aims,
                "reaches_aim": ttft_ms <= aims["ttft_p50_ms"] and tpot_ms <= aims["tpot_p99_ms"],
            }
            print(
                f"1P1D {rate}: TTFT p50 {ttft_ms / bound.p50_ms:.2f} x the queueing bound "
                f"{bound.p50_ms:.1f}; TPOT p99 {tpot_ms / found.step_ms:.2f} x a step",
                flush=True,
            )

    def add_promises(self) -> None:
        """Adds the rows of the table that compare load points."""
        self.add_bounds()
        split, whole = self._figures.get(("1P1D", "idle")), self._figures.get(("colo1", "idle"))
        if split and whole:
            added_ms = split.token_2.p50_ms - whole.token_2.p50_ms
            self._promise("token 2, idle: 1P1D minus colocated", added_ms, "ms", 4.0, 1.5)
        if split:
            over_ms = split.first_gap.p50_ms - split.step_ms
            self._promise("gap 1 -> 2, idle, beyond a step", over_ms, "ms", 3.0, 1.5)
        for rate in ("8", "16"):
            found = self._figures.get(("1P1D", rate))
            if found:
                gap = found.first_gap
                self._promise(f"gap 1 -> 2 at {rate} req/s p50", gap.p50_ms, "ms", None, None)
                self._promise(f"gap 1 -> 2 at {rate} req/s p99", gap.p99_ms, "ms", None, None)
        busy = self._figures.get(("1P1D", "16"))
        if busy:
            gap = busy.longest_gap
            self._promise("longest gap at 16 req/s p50", gap.p50_ms, "ms", 15, 10)
            self._promise("longest gap at 16 req/s p99", gap.p99_ms, "ms", 30, 20)
        full = self._figures.get(("1P1D", "saturated"))
        if full:
            self._promise("saturated 1P1D, 2048/128", full.done_per_s, "req/s", 20.2, 21.3)

    def _promise(
        self, name: str, value: float, unit: str, must: float | None, aim: float | None
    ) -> None:
        row: Row = {"bench": name, "value": value, "unit": unit, "must": must, "aim": aim}
        if must is not None and aim is not None:
            is_upper = aim > must
            row["holds"] = value >= must if is_upper else value <= must
            row["reaches_aim"] = value >= aim if is_upper else value <= aim
        self.rows.append(row)
        print(f"{name:<44} {value:8.2f} {unit}  must {must} aim {aim}", flush=True)


def is_better(found: Figures, theirs: Reference) -> bool:
    """Says whether TTFT and TPOT beat another engine's, at p50 and at p99."""
    ttft, tpot = found.ttft, found.tpot
    ours = (ttft.p50_ms, ttft.p99_ms, tpot.p50_ms, tpot.p99_ms)
    return all(
        mine < other for mine, other in zip(ours, theirs.ttft_ms + theirs.tpot_ms, strict=True)
    )


def describe(mode: str, rate: str, found: Figures) -> str:
    """Says a load point in one line."""
    spreads = {
        "TTFT": found.ttft,
        "tok2": found.token_2,
        "gap12": found.first_gap,
        "longest": found.longest_gap,
        "TPOT": found.tpot,
    }
    parts = [f"{name} {one.p50_ms:.1f}/{one.p99_ms:.1f}" for name, one in spreads.items()]
    return (
        f"{mode:5s} {rate:>9s}: {', '.join(parts)}, step {found.step_ms:.2f}, "
        f"{found.mean_running:.1f} running, {found.done_per_s:.1f} req/s, "
        f"{found.num_failed} failed of {found.num_requests}"
    )


def main() -> int:
    """Measures what is asked for and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals, at each load")
    parser.add_argument("--model", type=Path, help="a folder; Llama-3-8B's shape by default")
    parser.add_argument("--flag", action="append", default=[], help="for pdserve serve")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_serving.json")
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    has_failed = False

    def save() -> None:
        # Where spans went is this machine's business.
        flags = [one for one in arguments.flag if not one.startswith("--span-folder")]
        parts = {"flags": flags, "rows": bench.rows}
        write_gpu("gpu_serving", arguments.out, __doc__, started_s, **parts)

    bench = Bench(arguments.seconds, arguments.rates.split(","), save)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or make_model_folder(Path(scratch))
        for mode in arguments.modes.split(","):
            try:
                bench.measure(mode, folder, arguments.flag)
            except Exception as error:  # noqa: BLE001  one mode must not cost the others
                has_failed = True
                print(f"FAILED {mode}: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
    bench.add_promises()
    save()
    print(f"written: {arguments.out}, {time.perf_counter() - started_s:.0f} s in all")
    return 1 if has_failed or any(row.get("holds") is False for row in bench.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
