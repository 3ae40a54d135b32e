# SPDX-License-Identifier: Apache-2.0
"""The dashboard's panels and queries, as its JSON has them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.dashboard.promql import Labels

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana" / "hybrid_kv.json"


@dataclass(frozen=True)
class Query:
    """One query of a panel, and the legend of its series."""

    expression: str
    legend: str

    def name(self, labels: Labels) -> str:
        """The legend of the series with these labels."""
        values = dict(labels)
        return re.sub(r"\{\{(\w+)\}\}", lambda match: values.get(match[1], ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """One panel; ``column``, ``row``, ``width`` and ``height`` are in Grafana's grid."""

    title: str
    kind: str
    unit: str
    is_stacked: bool
    column: int
    row: int
    width: int
    height: int
    queries: tuple[Query, ...]
    #: Values that are shown as a text in a colour.
    mappings: Mapping[float, tuple[str, str]]


def load() -> Any:
    """The dashboard's JSON."""
    return json.loads(DASHBOARD.read_text())


def panels(dashboard: Any, variables: Mapping[str, str]) -> list[Panel]:
    """All panels, with the dashboard's variables replaced in the queries.

    Raises:
        KeyError: for a variable that has no value.
    """
    return [_panel(panel, variables) for panel in dashboard["panels"]]


def _panel(panel: Any, variables: Mapping[str, str]) -> Panel:
    defaults, place = panel["fieldConfig"]["defaults"], panel["gridPos"]
    stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
    return Panel(
        title=panel["title"],
        kind=panel["type"],
        unit=defaults.get("unit", "short"),
        is_stacked=stacking != "none",
        column=place["x"],
        row=place["y"],
        width=place["w"],
        height=place["h"],
        queries=tuple(
            Query(
                re.sub(r"\$(\w+)", lambda match: variables[match[1]], target["expr"]),
                target["legendFormat"],
            )
            for target in panel["targets"]
        ),
        mappings={
            float(value): (shown["text"], shown["color"])
            for mapping in defaults.get("mappings", ())
            for value, shown in mapping["options"].items()
        },
    )
