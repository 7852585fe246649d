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
