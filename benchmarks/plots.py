"""Pictures. Without matplotlib (`pip install -e .[bench]`) there is none, and a line says so."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

if find_spec("matplotlib") is None:
    plt = None
else:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt


def plot_gaps(
    path: Path,
    gaps_by_name: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    arrivals_s: Sequence[float],
) -> None:
    """Draws the gap before each token of steady streams over time, one panel a configuration.

    Args:
        path: the PNG to write.
        gaps_by_name: per configuration and stream, (seconds since the first arrival, gap in ms).
        arrivals_s: when prompts arrived.
    """
    if plt is None:
        print(f"matplotlib is not installed: no {path.name}")
        return
    figure, axes = plt.subplots(
        len(gaps_by_name), 1, sharex=True, sharey=True, figsize=(9, 2.2 * len(gaps_by_name))
    )
    for axis, (name, streams) in zip(axes, gaps_by_name.items(), strict=True):
        for stream in streams:
            axis.plot([at for at, _ in stream], [gap for _, gap in stream], linewidth=0.8)
        for at_s in arrivals_s:
            axis.axvline(at_s, color="0.7", linestyle=":", linewidth=0.8)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_ylabel("gap, ms", fontsize=8)
        axis.set_yscale("log")
    axes[-1].set_xlabel("seconds; dotted: a prompt of 1,000 tokens arrives", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_roofline(
    path: Path,
    points_by_name: Mapping[str, Sequence[tuple[float, float, str]]],
    *,
    read_tb_per_s: float,
    tflop_per_s: float,
) -> None:
    """Draws what was reached under what a card can do.

    Args:
        path: the PNG to write.
        points_by_name: per engine, (operations a byte, TFLOP/s, label); the first one is labelled.
        read_tb_per_s: measured bandwidth of its memory.
        tflop_per_s: measured rate of large matrix products.
    """
    if plt is None:
        print(f"matplotlib is not installed: no {path.name}")
        return
    figure, axis = plt.subplots(figsize=(9, 6))
    lowest = min(at for points in points_by_name.values() for at, _, _ in points) / 2
    highest = max(at for points in points_by_name.values() for at, _, _ in points) * 2
    knee = tflop_per_s / read_tb_per_s
    roof = [(at, min(tflop_per_s, at * read_tb_per_s)) for at in (lowest, knee, highest)]
    axis.plot([at for at, _ in roof], [top for _, top in roof], color="0.3", linewidth=1.2)
    for (name, points), marker in zip(points_by_name.items(), "ox+", strict=False):
        axis.plot([at for at, _, _ in points], [rate for _, rate, _ in points], marker, label=name)
    for at, rate, label in next(iter(points_by_name.values())):
        axis.annotate(
            label, (at, rate), xytext=(5, -9), textcoords="offset points", fontsize=6, color="0.3"
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte of memory traffic")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{read_tb_per_s:g} TB/s, {tflop_per_s:g} TFLOP/s", fontsize=9, loc="left")
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"written: {path.name}")
