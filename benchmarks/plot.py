# SPDX-License-Identifier: Apache-2.0
"""Plot the cost of the KV cache manager, from the JSON of `manager.py`.

python benchmarks/manager.py --json groups.json
python benchmarks/manager.py --groups 6 --requests 16 64 256 1024 --json requests.json
python benchmarks/plot.py groups.json requests.json docs/figures/manager.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

COLORS = {"base": "tab:orange", "hybrid": "tab:blue"}
#: The operations that are shown, and their line styles.
STYLES = {"decode": "-", "place": "--"}
TITLES = {"decode": "a decode step", "place": "place a prompt"}


def draw(axes: Axes, results: list[dict[str, Any]], against: str) -> None:
    """Draw the cost per request in microseconds against the number of groups or of requests."""
    for name, color in COLORS.items():
        for operation, style in STYLES.items():
            points = [r for r in results if r["operation"] == operation]
            axes.plot(
                [point[against] for point in points],
                [point[name] * 1e6 for point in points],
                style,
                color=color,
                marker="o",
                label=f"{name}: {TITLES[operation]}",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted({r[against] for r in results}), minor=False)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", type=Path, help="JSON of manager.py with several --groups")
    parser.add_argument("requests", type=Path, help="JSON of manager.py with several --requests")
    parser.add_argument("image", type=Path, help="the image to write: .svg or .png")
    arguments = parser.parse_args()
    groups = json.loads(arguments.groups.read_text())["results"]
    requests = json.loads(arguments.requests.read_text())["results"]

    # The same numbers must give the same file.
    plt.rcParams["svg.hashsalt"] = "hybrid-kv"
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    draw(left, groups, "groups")
    left.set_xlabel(f"KV cache groups ({groups[0]['requests']} requests)")
    left.set_ylabel("us for one request")
    left.legend(fontsize="small")
    draw(right, requests, "requests")
    right.set_xlabel(f"running requests ({requests[0]['groups']} groups)")
    arguments.image.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(
        arguments.image, metadata={"Date": None} if arguments.image.suffix == ".svg" else None
    )


if __name__ == "__main__":
    main()
