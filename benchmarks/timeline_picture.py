"""Draws the spans of one request as an SVG: a lane for whoever was at work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, TOP, LANE, BAR = 1160, 170, 64, 30, 18
COLORS = {
    "step": "#4c78a8",
    "pack": "#f58518",
    "frame": "#e4a853",
    "scatter": "#54a24b",
    "handle": "#b279a2",
    "token": "#333333",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A span in a lane."""

    lane: str
    kind: str
    start_ms: float
    end_ms: float
    label: str = ""


LANES = (
    "client",
    "prefill: steps",
    "prefill: events",
    "prefill: frames packed",
    "link: frames",
    "decode: frames scattered",
    "decode: events",
    "decode: steps",
)


def make_bars(token_ms: Sequence[float], spans: Sequence[Mapping[str, object]]) -> list[Bar]:
    """Gives each span its lane.

    A frame is on the link from its packing, or from when it was computed, to its landing.
    """
    bars = [
        Bar(lane="client", kind="token", start_ms=at, end_ms=at, label=f"token {number}")
        for number, at in enumerate(token_ms, 1)
    ]
    packed: dict[object, float] = {}
    for span in spans:
        is_sent = span["name"] == "posted" and span.get("event") == "frame sent"
        if is_sent and "on_link_us" in span:
            sent_ms, on_link_us = span["end_ms"], span["on_link_us"]
            packed[span.get("frame")] = float(str(sent_ms)) - int(str(on_link_us)) / 1e3
    for span in spans:
        side = str(span["process"]).partition("-")[0]
        start, end = float(str(span["start_ms"])), float(str(span["end_ms"]))
        name, event, frame = span["name"], span.get("event"), span.get("frame")
        if name == "step":
            label = f"{span['num_tokens']} tokens"
            bars.append(
                Bar(lane=f"{side}: steps", kind="step", start_ms=start, end_ms=end, label=label)
            )
        elif name == "pack":
            packed.setdefault(frame, start)
            bars.append(Bar(lane=f"{side}: frames packed", kind="pack", start_ms=start, end_ms=end))
        elif name == "scatter":
            lane = f"{side}: frames scattered"
            bars.append(Bar(lane=lane, kind="scatter", start_ms=start, end_ms=end))
        elif name == "posted" and event == "frame landed" and frame in packed:
            bars.append(
                Bar(
                    lane="link: frames",
                    kind="frame",
                    start_ms=packed[frame],
                    end_ms=start,
                    label=str(frame),
                )
            )
        elif name == "handle" and frame is None:
            lane = f"{side}: events"
            bars.append(Bar(lane=lane, kind="handle", start_ms=start, end_ms=end, label=str(event)))
    return bars


def draw(title: str, token_ms: Sequence[float], spans: Sequence[Mapping[str, object]]) -> str:
    """Returns the picture: the whole request above, from its first token on below."""
    bars = make_bars(token_ms, spans)
    end_ms = max([*token_ms, *(bar.end_ms for bar in bars)])
    zoom = (max(0.0, token_ms[0] - 4.0), min(end_ms, token_ms[1] + 1.0))
    height = TOP + LANE * len(LANES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{2 * height + 30}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_panel(title, bars, (0.0, end_ms), 0),
        *_panel("from token 1 to token 2", bars, zoom, height + 10),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(title: str, bars: Sequence[Bar], window: tuple[float, float], top: int) -> list[str]:
    first, last = window
    scale = (WIDTH - LEFT - 40) / (last - first)

    def x_of(at_ms: float) -> float:
        return LEFT + (min(max(at_ms, first), last) - first) * scale

    parts = [f'<text x="12" y="{top + 24}" font-size="15">{escape(title)}</text>']
    bottom = top + TOP + LANE * len(LANES)
    for tick in _ticks(first, last):
        x = x_of(tick)
        parts.append(
            f'<line x1="{x:.1f}" y1="{top + TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{top + TOP - 12}" text-anchor="middle" fill="#777">'
            f"{tick:g} ms</text>"
        )
    for number, lane in enumerate(LANES):
        y = top + TOP + LANE * number
        parts.append(f'<text x="12" y="{y + 15}">{lane}</text>')
        free_x = 0.0
        for bar in (one for one in bars if one.lane == lane):
            if bar.end_ms < first or bar.start_ms > last:
                continue
            x, end = x_of(bar.start_ms), x_of(bar.end_ms)
            width = max(1.5, end - x)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{COLORS[bar.kind]}" fill-opacity="0.8"/>'
            )
            if bar.label and x + 3 >= free_x:
                parts.append(f'<text x="{x + 3:.1f}" y="{y + 13}">{escape(bar.label)}</text>')
                free_x = x + 9 + 6.5 * len(bar.label)
    return parts


def _ticks(first: float, last: float) -> list[float]:
    step = next(size for size in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if (last - first) / size < 15)
    number = int(first / step) + (first > 0)
    ticks = []
    while number * step <= last:
        ticks.append(number * step)
        number += 1
    return ticks
