# SPDX-License-Identifier: Apache-2.0
"""The metrics of a real server under load, and the Grafana dashboard's queries on them.

The server has two API server processes, so each of them gets a part of the reports, and base's
multiprocess mode puts the metrics together. It has two data parallel engines. Their pools are so
small that requests wait for blocks.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.server import MODEL_NAME, Server
from support.server_questions import wait_until_idle
from tools import checkpoints
from tools.dashboard.load import Load, scrape_until
from tools.dashboard.panels import Panel, Query, load, panels
from tools.dashboard.promql import Scrape, evaluate, select, selectors
from vllm.v1.core.hybrid.metrics.prometheus import METRICS, PREFIX

#: Of each engine.
NUM_BLOCKS = 100
ENGINES = ("0", "1")
FULL, WINDOW = "full_attention", "sliding_window 64"
#: Of the dashboard, and what Grafana fills in. The rates cover the whole time.
VARIABLES = {"model_name": MODEL_NAME, "engine": ".*", "__rate_interval": "10m"}
DASHBOARD = load()
PANELS = panels(DASHBOARD, VARIABLES)
QUERIES = [(panel, query) for panel in PANELS for query in panel.queries]
#: All counters, by type where types have their own.
COUNTERS = [
    (f"{PREFIX}{metric.name}_total", {"attention_type": name} if metric.labels else {})
    for metric in METRICS
    if metric.is_counter
    for name in ((FULL, WINDOW) if metric.labels else ("",))
]
#: Full attention caches all blocks, whether before a junction or not.
NEVER_MOVE = [(f"{PREFIX}junctions_kept_total", {"attention_type": FULL})]


def value(scrape: Scrape, name: str, labels: dict[str, str] | None = None) -> float:
    """The sum over the engines of the sample with just these labels besides; 0 if there is none."""
    total = 0.0
    for engine in ENGINES:
        all_labels = {"model_name": MODEL_NAME, "engine": engine} | (labels or {})
        total += scrape.samples.get((name, tuple(sorted(all_labels.items()))), 0.0)
    return total


def has_moved(scrapes: list[Scrape]) -> bool:
    """Whether every counter has risen between two scrapes, as a rate needs it."""
    return all(
        any(0 < value(scrape, *counter) < value(scrapes[-1], *counter) for scrape in scrapes)
        for counter in COUNTERS
        if counter not in NEVER_MOVE
    )


class Observed:
    """What a server's ``/metrics`` gave."""

    def __init__(self) -> None:
        arguments = [
            "--max-model-len=1024",
            "--max-num-batched-tokens=128",
            f"--num-gpu-blocks-override={NUM_BLOCKS}",
            "--api-server-count=2",
            "--data-parallel-size=2",
        ]
        with Server(checkpoints.tiny_gemma3(), hybrid=True, arguments=arguments) as server:
            server.wait_until_healthy()
            with Load(server.api_url, MODEL_NAME):
                self.under_load = scrape_until(server.url, has_moved, timeout=300)
            wait_until_idle(server)
            self.idle = Scrape.parse(0, server.http.get("/metrics").raise_for_status().text)


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    yield Observed()


def test_every_metric_is_there_with_its_labels(observed: Observed) -> None:
    ours: dict[str, dict[str, set[tuple[str, ...]]]] = {engine: {} for engine in ENGINES}
    for name, pairs in observed.idle.samples:
        if name.startswith(PREFIX):
            labels = dict(pairs)
            assert labels.pop("model_name") == MODEL_NAME
            of_engine = ours[labels.pop("engine")]
            short = name.removeprefix(PREFIX).removesuffix("_total")
            of_engine.setdefault(short, set()).add(tuple(labels.values()))
    by_type = {(FULL,), (WINDOW,)}
    assert ours[ENGINES[0]] == ours[ENGINES[1]]
    assert ours[ENGINES[0]] == {
        "active": {("",)},
        "blocks": {("any", "blank")}
        | {(name, state) for (name,) in by_type for state in ("cached", "referenced")},
    } | {m.name: by_type if m.labels else {()} for m in METRICS if m.is_counter}


def test_all_counters_move_under_load(observed: Observed) -> None:
    assert has_moved(observed.under_load)
    for counter in COUNTERS:
        assert (value(observed.idle, *counter) > 0) == (counter not in NEVER_MOVE), counter


def test_the_values_agree_with_each_other_and_with_vllms(observed: Observed) -> None:
    def total(name: str, **labels: str) -> float:
        return value(observed.idle, f"{PREFIX}{name}", labels)

    assert total("active", reason="") == len(ENGINES)
    blocks = [
        number for (name, _), number in observed.idle.samples.items() if name == f"{PREFIX}blocks"
    ]
    # All but the null blocks, none of which is in use.
    assert sum(blocks) == len(ENGINES) * (NUM_BLOCKS - 1)
    assert total("blocks", attention_type=FULL, state="referenced") == 0
    assert total("blocks", attention_type=FULL, state="cached") > 0

    hits = total("prefix_hit_tokens_total")
    assert hits == value(observed.idle, "vllm:prefix_cache_hits_total") > 0
    cuts = [total("prefix_cut_tokens_total", attention_type=name) for name in (FULL, WINDOW)]
    assert hits + sum(cuts) == total("prefix_lookup_tokens_total")
    queries = value(observed.idle, "vllm:prefix_cache_queries_total")
    assert 0 < total("prefix_lookup_tokens_total") < queries


@pytest.mark.parametrize(
    ("panel", "query"),
    QUERIES,
    ids=[f"{panel.title}, {query.legend}" for panel, query in QUERIES],
)
def test_every_query_shows_something(observed: Observed, panel: Panel, query: Query) -> None:
    scrapes = observed.under_load
    for selector in selectors(query.expression):
        assert select(selector, scrapes[-1]), f"{selector.name} has no such series"
    values = evaluate(query.expression, scrapes)
    assert values
    assert all(math.isfinite(number) for number in values.values())
    # A gauge, such as of cached blocks, can be 0 at a moment.
    peaks = [
        max(evaluate(query.expression, scrapes[: i + 1]).values(), default=0)
        for i in range(len(scrapes))
    ]
    assert max(peak for peak in peaks if math.isfinite(peak)) > 0
    if panel.unit == "percentunit":
        assert all(0 <= number <= 1 for number in values.values())
    # The legend tells the series apart, and uses only labels that they have.
    assert len({query.name(labels) for labels in values}) == len(values)
    for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
        assert all(label in dict(labels) for labels in values)


def test_the_dashboards_variables_have_values(observed: Observed) -> None:
    found = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            expression = match[1].replace("$model_name", MODEL_NAME)
            series = evaluate(expression, observed.under_load)
            found[variable["name"]] = {dict(labels)[match[2]] for labels in series}
    assert found == {"model_name": {MODEL_NAME}, "engine": {*ENGINES}}


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {selector.name for _, query in QUERIES for selector in selectors(query.expression)}
    assert shown == {f"{PREFIX}{m.name}{'_total' * m.is_counter}" for m in METRICS}


def test_the_dashboard_fits_grafanas_grid() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        area = {
            (column, row)
            for column in range(panel.column, panel.column + panel.width)
            for row in range(panel.row, panel.row + panel.height)
        }
        assert max(column for column, _ in area) < 24
        assert not area & cells, f"{panel.title} lies on another panel"
        cells |= area


def test_each_panel_uses_the_dashboards_data_source() -> None:
    def sources(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            if "datasource" in node:
                yield node["datasource"]
            for child in node.values():
                yield from sources(child)
        elif isinstance(node, list):
            for child in node:
                yield from sources(child)

    found = list(sources(DASHBOARD["panels"]))
    assert len(found) == len(PANELS) + len(QUERIES)
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in found)
