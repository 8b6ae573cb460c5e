"""Plots of a sweep and of reliability, as SVG files that are the same for the same figures (the extra `kaminari-core[plot]`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.run import Evaluation
from kaminari_core.evaluation.sweep import Row

MISSING = "plots need matplotlib: pip install 'kaminari-core[plot]'"


def is_available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import_module("matplotlib")
    except ImportError:
        return False
    return True


def plot_sweep(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write cer.svg, pages_per_s.svg and memory.svg: over the first axis of numbers, a line for each of the other values.

    Raises UsageError when matplotlib is missing.
    """
    figures: list[tuple[str, str, Callable[[Evaluation], float]]] = [
        ("cer", "character error rate, %", lambda found: 100 * (found.quality.text.cer if found.quality.text else 0)),
        ("pages_per_s", "pages/s", lambda found: found.pages_per_s),
        ("memory", "peak memory, MB", lambda found: found.memory / 1e6),
    ]
    return [_plot(rows, folder / f"{name}.svg", label, value) for name, label, value in figures]


def across(rows: Sequence[Row]) -> str:
    """The axis that a plot's abscissa is: the first with several values that are all numbers, else the first."""
    axes = list(rows[0].values)
    for axis in axes:
        values = {row.values[axis] for row in rows}
        if len(values) > 1 and all(value.replace(".", "", 1).isdecimal() for value in values):
            return axis
    return axes[0]


def _plot(rows: Sequence[Row], file: Path, label: str, value: Callable[[Evaluation], float]) -> Path:
    axis = across(rows)
    lines: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        if row.evaluation is not None:
            others = ", ".join(f"{text}" for name, text in row.values.items() if name != axis)
            lines.setdefault(others or label, []).append((row.values[axis], value(row.evaluation)))
    plot = _axes()
    for name, points in lines.items():
        plot.plot([point[0] for point in points], [point[1] for point in points], marker="o", label=name)
    plot.set_xlabel(axis)
    plot.set_ylabel(label)
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)
    plot.legend(fontsize="small")
    return _save(plot, file)


def _axes() -> Any:
    if not is_available():
        raise UsageError(MISSING)
    from matplotlib.figure import Figure

    return Figure(figsize=(6.4, 4), layout="constrained").subplots()


def _save(plot: Any, file: Path) -> Path:
    import matplotlib as mpl

    # Without a salt and without a date, equal figures give equal files.
    with mpl.rc_context({"svg.hashsalt": "kaminari", "svg.fonttype": "none"}):
        plot.figure.savefig(file, metadata={"Date": None, "Creator": None})
    return file
