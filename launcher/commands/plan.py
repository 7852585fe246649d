"""`pdserve plan`: how many workers a trace needs, found by simulating it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autoscaler.settings import MOST_REPLICAS
from launcher.options.number import count, number, read_number
from launcher.options.pools import PoolOptions, first_size
from launcher.output_file import check_writable, write_output
from launcher.tables import make_table, open_console
from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from simulation import scaled_plan
from simulation.page import COLUMNS, cells_of, make_page
from simulation.profile_files import find_profile
from simulation.report import Slo
from simulation.sampling import check_durations, take_busiest
from simulation.scaled_plan import ScaledPlan, make_scaled_plan
from simulation.search import Plan, Search, Trial, coarse, usable_tokens
from simulation.shape import Scaling
from simulation.traces import read_trace
from simulation.workload import Workload, limit_lengths, scale_lengths, scale_rate

EXIT_NO_PLAN = 3
MOST_REQUESTS = 1_000_000
LEAST_WAIT_S = 1e-6
MOST_WAIT_S = 86_400.0
"""A day: nobody waits longer, for a token or for a replica."""


def plan(
    trace: Annotated[Path, typer.Option(help="A Mooncake .jsonl or Azure .csv trace, maybe .gz.")],
    model: Annotated[str, typer.Option(help="The model that the profiles are of.")],
    gpu: Annotated[
        list[str],
        typer.Option(help="A profile: a file of `pdserve profile`, or a device we have one of."),
    ],
    slo: Annotated[
        str, typer.Option(help="Objectives in seconds: ttft=2,tpot=0.05.")
    ] = "ttft=2,tpot=0.05",
    attainment: Annotated[
        float, number("--attainment", "Share of requests that must keep both.", 0.01, 1.0)
    ] = 0.95,
    requests: Annotated[
        int, count("--requests", "Of the trace's busiest stretch, to simulate.", 10, MOST_REQUESTS)
    ] = 800,
    rate: Annotated[float, number("--rate", "Speeds the trace up.", 0.001, 1000.0)] = 1.0,
    divide_lengths: Annotated[
        float,
        number("--divide-lengths", "Divides all lengths; what is shared still is.", 0.01, 1e6),
    ] = 1.0,
    max_workers: Annotated[int, count("--max-workers", "Of both pools.", 2, MOST_REPLICAS)] = 256,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN..MAX",
            help="With --decode: also what the autoscaler would do over the whole trace.",
        ),
    ] = None,
    decode: Annotated[str | None, typer.Option(metavar="N|MIN..MAX", help="Likewise.")] = None,
    max_replicas: Annotated[
        int | None, count("--max-replicas", "Of both sized pools together.", 1, 2 * MOST_REPLICAS)
    ] = None,
    start_s: Annotated[
        float, number("--start-s", "From the start of a replica until it serves.", 0.0, MOST_WAIT_S)
    ] = 20.0,
    flips: Annotated[
        bool, typer.Option("--flips/--no-flips", help="Replicas may change their pool in place.")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="Writes the plan as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Writes a page with curves (HTML).")] = None,
) -> int:
    """Plans both pools for a trace: sizes, goodput, latencies, cost. Needs no GPU."""
    objectives = parse_slo(slo)
    _check_files(output, plot)
    scaling = make_scaling(
        prefill, decode, objectives, max_replicas=max_replicas, start_s=start_s, flips=flips
    )
    profiles = tuple(find_profile(name, model) for name in gpu)
    workload = read_trace(trace)
    if divide_lengths != 1.0:
        workload = scale_lengths(workload, divide_lengths)
    if rate != 1.0:
        workload = scale_rate(workload, rate)
    workload = limit_lengths(workload, min(usable_tokens(coarse(one)) for one in profiles))
    if not workload.arrivals:
        raise ConfigError(
            f"trace: no request of {workload.name} fits a worker", settings=("trace",)
        )
    console = Console(stderr=True, soft_wrap=True)
    sample = take_busiest(workload, requests)
    check_durations(workload, sample)
    console.print(f"Simulating {sample.text}.")
    search = Search(
        sample=sample,
        slo=objectives,
        attainment=attainment,
        max_workers=max_workers,
        note=lambda trial: _tell(console, trial),
    )
    found = search.run(profiles)
    out = open_console()
    _show(out, found, model)
    scaled = None
    if scaling is not None:
        console.print(f"Simulating all {len(workload.arrivals)} requests with sized pools.")
        scaled = _scale(workload, found, profiles, scaling)
        _show_scaled(out, scaled)
    if output is not None:
        text = json.dumps(plan_to_json(found, model, scaled), indent=1)
        write_output("--output", output, text + "\n")
    if plot is not None:
        write_output("--plot", plot, make_page(found, model, scaled))
    return 0 if found.chosen is not None else EXIT_NO_PLAN


def make_scaling(
    prefill: str | None,
    decode: str | None,
    slo: Slo,
    *,
    max_replicas: int | None,
    start_s: float,
    flips: bool,
) -> Scaling | None:
    """Returns how both pools are to be sized; None without a word of their ranges.

    Raises:
        ConfigError: one range is missing, or they cannot be.
    """
    if prefill is None and decode is None:
        return None
    if prefill is None or decode is None:
        raise ConfigError(
            "prefill and decode must be given together", settings=("prefill", "decode")
        )
    options = PoolOptions(
        prefill=prefill,
        decode=decode,
        max_replicas=max_replicas,
        ttft_target_s=slo.ttft_s,
        tpot_target_s=slo.tpot_s,
    )
    settings = replace(options.settings(), start_s=start_s, flips_in_place=flips)
    return Scaling(settings=settings, start_s=start_s)


def parse_slo(text: str) -> Slo:
    """Reads `ttft=2,tpot=0.05`.

    Raises:
        ConfigError: it is something else.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if name not in ("ttft", "tpot") or not equals:
            raise ConfigError(
                f"slo must be like ttft=2,tpot=0.05 (seconds), got {text!r}", settings=("slo",)
            )
        if name in values:
            raise ConfigError(f"slo must name {name} once, got {text!r}", settings=("slo",))
        values[name] = read_number(f"--slo {name}", value, LEAST_WAIT_S, MOST_WAIT_S)
    if len(values) != 2:
        raise ConfigError(f"slo must name ttft and tpot, got {text!r}", settings=("slo",))
    return Slo(ttft_s=values["ttft"], tpot_s=values["tpot"])


def _check_files(output: Path | None, plot: Path | None) -> None:
    for flag, path in (("--output", output), ("--plot", plot)):
        if path is not None:
            check_writable(flag, path)
    if output is not None and plot is not None and output.resolve() == plot.resolve():
        raise ConfigError(f"--plot must differ from --output, got {plot}")


def _scale(
    workload: Workload, found: Plan, profiles: tuple[Profile, ...], scaling: Scaling
) -> ScaledPlan:
    """Simulates sized pools of the chosen plan's kind of workers, else of the first kind."""
    chosen, settings = found.chosen, scaling.settings
    return make_scaled_plan(
        workload,
        coarse(profiles[0]) if chosen is None else chosen.profile,
        scaling,
        found.slo,
        first_sizes=(first_size(settings.prefill), first_size(settings.decode)),
        fixed_sizes=None if chosen is None else (chosen.num_prefill, chosen.num_decode),
    )


def plan_to_json(found: Plan, model: str, scaled: ScaledPlan | None = None) -> dict[str, object]:
    """Returns what the file holds; of pools that are sized, every decision with its numbers."""
    return {
        "model": model,
        "simulated": found.sample,
        "slo": asdict(found.slo),
        "attainment": found.attainment,
        "hopeless_share": found.hopeless_share,
        "chosen": None if found.chosen is None else _trial_to_json(found.chosen),
        "trials": [_trial_to_json(trial) for trial in found.trials],
        "frontier": [_trial_to_json(trial) for trial in found.frontier],
        "scaled": None if scaled is None else asdict(scaled),
    }


def _trial_to_json(trial: Trial) -> dict[str, object]:
    return {
        "worker_class": trial.profile.worker_class,
        "num_prefill": trial.num_prefill,
        "num_decode": trial.num_decode,
        "num_gpus": trial.num_gpus,
        "rate": trial.rate,
        **asdict(trial.report),
    }


def _tell(console: Console, trial: Trial) -> None:
    console.print(
        f"  {trial.num_prefill} : {trial.num_decode} of {trial.profile.worker_class} at "
        f"{trial.rate:g} x: {trial.report.attainment:.1%} keep both",
        highlight=False,
    )


def _show_scaled(console: Console, scaled: ScaledPlan) -> None:
    """Prints what was paid and kept, and each decision."""
    seconds, count = scaled.duration_s, scaled.num_requests
    title = f"All {count} requests in {seconds:.0f} s: fixed and autoscaled pools"
    console.print(make_table(scaled_plan.COLUMNS, scaled_plan.rows_of(scaled), title=title))
    for decision in scaled.scaled.decisions:
        console.print(f"{decision.at_s:8.0f} s  {decision.describe()}", soft_wrap=True)


def _show(console: Console, found: Plan, model: str) -> None:
    slo = found.slo
    title = (
        f"{model}: TTFT <= {slo.ttft_s:g} s and TPOT <= {1000 * slo.tpot_s:g} ms for "
        f"{found.attainment:.0%} of the requests"
    )
    others = [trial for trial in found.frontier if trial is not found.chosen]
    table = make_table(
        COLUMNS,
        [cells_of(trial) for trial in (*found.trials, *others)],
        title=title,
        styles=[
            *("bold green" if trial is found.chosen else None for trial in found.trials),
            *("dim" for _ in others),
        ],
        sections=(len(found.trials) - 1,) if others else (),
    )
    console.print(table)
    if found.hopeless_share:
        console.print(
            f"{found.hopeless_share:.1%} of the requests cannot keep the TTFT even on idle workers."
        )
    chosen = found.chosen
    if chosen is None:
        console.print("No plan within the limits keeps the objectives.")
        return
    console.print(
        f"Plan: {chosen.num_prefill} prefill and {chosen.num_decode} decode workers, "
        f"{chosen.num_gpus} GPUs, {chosen.report.goodput_per_s:.2f} good requests/s, "
        f"{chosen.report.gpu_s_per_million_tokens:.0f} GPU seconds per 1M tokens."
    )
