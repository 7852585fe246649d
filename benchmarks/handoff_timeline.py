"""One request through two pools, as its spans tell it: measured, then drawn.

`python -m benchmarks.handoff_timeline [--prompt N] [--draw-only]`; needs two GPUs, a minute. Starts
1P1D as `benchmarks.gpu_serving` does, sends requests one at a time, and keeps the spans of the one
with the median time to token 2 in `results/handoff_timeline.json`. The picture is
`docs/handoff_timeline.svg`; `--draw-only` draws it again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS, gpu_names, versions
from benchmarks.serving_cluster import loading, serving
from benchmarks.serving_load import Answered, LoadPoint
from benchmarks.serving_model import make_model_folder
from benchmarks.timeline_picture import draw

PICTURE = Path(__file__).parent.parent / "docs" / "handoff_timeline.svg"
NUM_WARM, NUM_REQUESTS, OUTPUT_TOKENS = 3, 9, 6

Span = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A request's spans; times in milliseconds since its client sent it."""

    title: str
    token_ms: tuple[float, ...]
    """When the client had each token."""
    spans: tuple[Span, ...]


def measure(folder: Path, prompt_tokens: int, flags: Sequence[str], title: str) -> Timeline:
    """Runs requests one at a time and returns the spans of a typical one."""
    with tempfile.TemporaryDirectory() as scratch:
        span_flags = (f"--span-folder={scratch}", *flags)
        with (
            serving(folder, *span_flags, num_prefill=1, num_decode=1) as served,
            loading(served) as client,
        ):
            for num_requests, seed in ((NUM_WARM, 1), (NUM_REQUESTS, 2)):
                result = client.run(
                    LoadPoint(
                        num_requests=num_requests,
                        prompt_tokens=prompt_tokens,
                        output_tokens=OUTPUT_TOKENS,
                        rate_per_s=None,
                        seed=seed,
                    )
                )
        spans = [
            json.loads(line)
            for path in sorted(Path(scratch).glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
    return pick(result.answered, spans, title)


def pick(answered: Sequence[Answered], spans: Sequence[Span], title: str) -> Timeline:
    """Cuts out the request with the median time to token 2.

    Raises:
        ValueError: no request got two tokens.
    """
    good = [one for one in answered if len(one.at_s) > 1]
    if not good:
        raise ValueError(f"no request got two tokens: {[one.error for one in answered]}")
    good.sort(key=lambda one: one.at_s[1] - one.sent_s)
    chosen = good[len(good) // 2]
    start_s, end_s = chosen.sent_s, chosen.at_s[min(3, len(chosen.at_s) - 1)]
    inside = []
    for span in spans:
        begun_s, ended_s = span["start_s"], span["end_s"]
        assert isinstance(begun_s, float)
        assert isinstance(ended_s, float)
        if start_s <= begun_s <= end_s:
            rest = {key: value for key, value in span.items() if not key.endswith("_s")}
            times = {"start_ms": 1e3 * (begun_s - start_s), "end_ms": 1e3 * (ended_s - start_s)}
            inside.append({**rest, **times})
    inside.sort(key=lambda span: float(str(span["start_ms"])))
    return Timeline(
        title=title,
        token_ms=tuple(1e3 * (at_s - start_s) for at_s in chosen.at_s if at_s <= end_s),
        spans=tuple(inside),
    )


def show(timeline: Timeline) -> None:
    """Prints the spans."""
    tokens = ", ".join(f"{at:.2f}" for at in timeline.token_ms)
    print(f"{timeline.title}; tokens at {tokens} ms")
    for span in timeline.spans:
        start_ms, end_ms = float(str(span["start_ms"])), float(str(span["end_ms"]))
        words = " ".join(str(span[key]) for key in ("event", "frame", "num_tokens") if key in span)
        where = str(span["process"]).partition("-")[0]
        print(f"{start_ms:9.3f} {end_ms - start_ms:8.3f} {where:8s} {span['name']:8s} {words}")


def main() -> None:
    """Measures and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--model", type=Path, help="a folder; Llama-3-8B's shape by default")
    parser.add_argument("--flag", action="append", default=[], help="for pdserve serve")
    parser.add_argument("--out", type=Path, default=RESULTS / "handoff_timeline.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--draw-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.draw_only:
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.model or make_model_folder(Path(scratch))
            title = f"{arguments.prompt} tokens, 1P1D, idle"
            timeline = measure(folder, arguments.prompt, arguments.flag, title)
        report = {
            "benchmark": "handoff_timeline",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": gpu_names(),
            "versions": versions(),
            "flags": arguments.flag,
            "title": timeline.title,
            "token_ms": timeline.token_ms,
            "rows": timeline.spans,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    report = json.loads(arguments.out.read_text())
    timeline = Timeline(
        title=report["title"], token_ms=tuple(report["token_ms"]), spans=tuple(report["rows"])
    )
    show(timeline)
    arguments.picture.write_text(draw(timeline.title, timeline.token_ms, timeline.spans))
    print(f"drawn: {arguments.picture}")


if __name__ == "__main__":
    main()
