# SPDX-License-Identifier: Apache-2.0
"""Draws the dashboard's panels on its grid with matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from tools.dashboard.panels import Panel
from tools.dashboard.promql import Scrape, evaluate

#: Columns of Grafana's grid.
NUM_COLUMNS = 24
#: Inches of a column and of a row of the grid.
COLUMN, ROW = 0.6, 0.36


def series_of(panel: Panel, scrapes: Sequence[Scrape]) -> dict[str, list[float]]:
    """Per series of a panel, its legend and one value for each scrape; NaN where it has none."""
    found: dict[str, list[float]] = {}
    for query in panel.queries:
        for i in range(len(scrapes)):
            for labels, value in evaluate(query.expression, scrapes[: i + 1]).items():
                points = found.setdefault(query.name(labels), [math.nan] * len(scrapes))
                points[i] = value
    return dict(sorted(found.items()))


def draw(title: str, panels: Sequence[Panel], scrapes: Sequence[Scrape], image: Path) -> None:
    """Draw all panels, with the values at each scrape, into a .png or .svg file."""
    # The same numbers must give the same file.
    plt.rcParams |= {"svg.hashsalt": "hybrid-kv", "font.size": 8}
    num_rows = max(panel.row + panel.height for panel in panels)
    figure = plt.figure(figsize=(NUM_COLUMNS * COLUMN, num_rows * ROW), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(num_rows, NUM_COLUMNS)
    for panel in panels:
        rows = slice(panel.row, panel.row + panel.height)
        axes = figure.add_subplot(grid[rows, panel.column : panel.column + panel.width])
        axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
        series = series_of(panel, scrapes)
        if panel.kind == "stat":
            _draw_stat(axes, panel, series)
        else:
            _draw_lines(axes, panel, [scrape.time for scrape in scrapes], series)
    is_svg = image.suffix == ".svg"
    plt.savefig(image, dpi=None if is_svg else 110, metadata={"Date": None} if is_svg else None)


def _draw_stat(axes: Axes, panel: Panel, series: dict[str, list[float]]) -> None:
    axes.set_axis_off()
    for i, (name, values) in enumerate(series.items()):
        text, color = panel.mappings.get(values[-1], (f"{values[-1]:g}", "grey"))
        label = f"{name.strip()}: {text}"
        box = {"boxstyle": "round,pad=0.8", "facecolor": color, "alpha": 0.3, "linewidth": 0}
        axes.text(0.5, 0.6 - 0.3 * i, label, ha="center", fontsize=11, bbox=box)


def _draw_lines(
    axes: Axes, panel: Panel, times: Sequence[float], series: dict[str, list[float]]
) -> None:
    if panel.is_stacked:
        # Zeros where there is no value yet, because a stack has no gaps.
        rows = [[0 if math.isnan(v) else v for v in values] for values in series.values()]
        axes.stackplot(times, rows, labels=list(series), alpha=0.7)
    else:
        for name, values in series.items():
            axes.plot(times, values, label=name)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(bottom=0)
    if panel.unit == "percentunit":
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("seconds")
    axes.grid(alpha=0.3)
    columns = 1 if len(series) == 1 else 2
    axes.legend(fontsize=7, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.22))
