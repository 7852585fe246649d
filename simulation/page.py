"""A plan as one HTML page that needs nothing else: tables, and curves drawn as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from simulation import scaled_plan
from simulation.scaled_plan import ScaledPlan
from simulation.search import Plan, Trial

_WIDTH, _HEIGHT, _MARGIN = 460, 300, 52
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd; }
tr.chosen { background: #e8f4e8; font-weight: 600; }
svg { margin-right: 1em; } text { font-size: 12px; fill: #444; }
.note { color: #555; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points of one chart."""

    title: str
    unit: str
    points: tuple[tuple[float, float], ...]
    limit: float
    """The objective: a dashed line."""
    marked: int | None
    """The point of the workload's own rate."""


def make_page(plan: Plan, model: str, scaled: ScaledPlan | None = None) -> str:
    """Returns the page; what the autoscaler would do is on it where that was asked for."""
    chosen = plan.chosen
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>Plan for {escape(model)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Plan for {escape(model)}</h1>",
        f"<p class='note'>Simulated: {escape(plan.sample)}. Objectives: TTFT at most "
        f"{plan.slo.ttft_s:g} s and TPOT at most {1000 * plan.slo.tpot_s:g} ms for "
        f"{plan.attainment:.0%} of the requests.</p>",
    ]
    if plan.hopeless_share:
        parts.append(
            f"<p class='note'>{plan.hopeless_share:.1%} of the requests cannot keep the TTFT even "
            "on idle workers.</p>"
        )
    if chosen is None:
        parts.append("<p><b>No plan within the limits keeps the objectives.</b></p>")
    else:
        parts.append(
            f"<p><b>{chosen.num_prefill} prefill : {chosen.num_decode} decode</b> workers of "
            f"{escape(chosen.profile.worker_class)}, {chosen.num_gpus} GPUs, "
            f"{chosen.report.gpu_s_per_million_tokens:.0f} GPU seconds per million tokens.</p>"
        )
        parts += [_draw(curve) for curve in _curves(plan)]
    parts.append("<h2>All that was tried</h2>")
    parts.append(_table(plan.trials, chosen))
    if plan.frontier:
        parts.append("<h2>The chosen plan under other rates</h2>")
        parts.append(_table(plan.frontier, chosen))
    if scaled is not None:
        parts.append(f"<h2>Fixed and autoscaled pools, {scaled.num_requests} requests</h2>")
        parts.append(_scaled_table(scaled))
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _curves(plan: Plan) -> tuple[Curve, ...]:
    trials = plan.frontier
    marked = next((i for i, trial in enumerate(trials) if trial.rate == 1.0), None)
    rates = [trial.report.offered_per_s / trial.num_gpus for trial in trials]
    return tuple(
        Curve(
            title=title,
            unit=unit,
            points=tuple(zip(rates, values, strict=True)),
            limit=limit,
            marked=marked,
        )
        for title, unit, values, limit in (
            (
                "p99 TTFT over requests/s per GPU",
                "s",
                [trial.report.ttft.p99_s or 0.0 for trial in trials],
                plan.slo.ttft_s,
            ),
            (
                "p99 TPOT over requests/s per GPU",
                "ms",
                [1000 * (trial.report.tpot.p99_s or 0.0) for trial in trials],
                1000 * plan.slo.tpot_s,
            ),
            (
                "goodput per GPU over requests/s per GPU",
                "1/s",
                [trial.report.goodput_per_s / trial.num_gpus for trial in trials],
                0.0,
            ),
        )
    )


def _draw(curve: Curve) -> str:
    right = max(x for x, _ in curve.points) * 1.05 or 1.0
    top = max(curve.limit, *(y for _, y in curve.points)) * 1.1 or 1.0
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def at(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + x / right * wide, _HEIGHT - _MARGIN - y / top * high

    left, bottom = at(0, 0)
    lines = [
        f"<svg width='{_WIDTH}' height='{_HEIGHT}'>",
        f"<text x='{_MARGIN}' y='24'>{escape(curve.title)} ({escape(curve.unit)})</text>",
        f"<path d='M{left} {_MARGIN}V{bottom}H{left + wide}' fill='none' stroke='#888'/>",
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = at(right * share, top * share)
        lines.append(f"<text x='{x:.0f}' y='{bottom + 18:.0f}'>{right * share:.2g}</text>")
        lines.append(f"<text x='6' y='{y:.0f}'>{top * share:.3g}</text>")
    if curve.limit:
        _, y = at(0, curve.limit)
        lines.append(f"<path d='M{left} {y:.1f}h{wide}' stroke='#b33' stroke-dasharray='5 4'/>")
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in curve.points))
    lines.append(f"<path d='M{path}' fill='none' stroke='#26a' stroke-width='2'/>")
    for number, point in enumerate(curve.points):
        x, y = at(*point)
        colour = "#2a2" if number == curve.marked else "#26a"
        lines.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'/>")
    return "".join([*lines, "</svg>"])


def _table(trials: Sequence[Trial], chosen: Trial | None) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = []
    for trial in trials:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells_of(trial))
        mark = " class='chosen'" if trial is chosen else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _scaled_table(scaled: ScaledPlan) -> str:
    rows = [scaled_plan.COLUMNS, *scaled_plan.rows_of(scaled)]
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


COLUMNS = (
    "workers",
    "P : D",
    "GPUs",
    "rate",
    "kept both",
    "goodput /s",
    "TTFT p50 s",
    "p99",
    "TPOT p50 ms",
    "p99",
    "hits",
    "GPU s / 1M tokens",
)


def cells_of(trial: Trial) -> tuple[str, ...]:
    """Returns a trial's line of a table."""
    report = trial.report
    return (
        trial.profile.worker_class,
        f"{trial.num_prefill} : {trial.num_decode}",
        str(trial.num_gpus),
        f"{trial.rate:g} x",
        f"{report.attainment:.1%}",
        f"{report.goodput_per_s:.2f}",
        _number(report.ttft.p50_s, 1.0, 3),
        _number(report.ttft.p99_s, 1.0, 3),
        _number(report.tpot.p50_s, 1000.0, 1),
        _number(report.tpot.p99_s, 1000.0, 1),
        f"{report.hit_rate:.0%}",
        f"{report.gpu_s_per_million_tokens:.0f}",
    )


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
