# SPDX-License-Identifier: Apache-2.0
"""Evaluates the PromQL that the dashboard uses, on scrapes of ``/metrics``.

`promql_parser` parses all of PromQL. Evaluated are selectors, ``rate``, ``scalar``, ``sum`` and
arithmetic with at most one vector per side and equal labels. Anything else raises.
"""

import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

#: Labels without the name, sorted by label.
Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan,
}
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "Equal": lambda value, wanted: value == wanted,
    "NotEqual": lambda value, wanted: value != wanted,
    "Re": lambda value, wanted: re.fullmatch(wanted, value) is not None,
    "NotRe": lambda value, wanted: re.fullmatch(wanted, value) is None,
}


@dataclass(frozen=True)
class Scrape:
    """All samples of one scrape: name and labels to value."""

    #: In seconds.
    time: float
    samples: dict[tuple[str, Labels], float]

    @classmethod
    def parse(cls, time: float, text: str) -> "Scrape":
        """From the text of ``/metrics``."""
        return cls(
            time,
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            },
        )


def evaluate(query: str, scrapes: Sequence[Scrape]) -> Vector:
    """The value of a query at the last of some scrapes, in the order of time.

    Raises:
        ValueError: for text that is not PromQL.
        NotImplementedError: for PromQL that is not evaluated here.
    """
    value = _evaluate(promql.parse(query), scrapes)
    return value if isinstance(value, dict) else {(): value}


def selectors(query: str) -> list[Any]:
    """All vector selectors of a query."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        elif isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)

    promql.walk(promql.parse(query), visit)
    return found


def select(selector: Any, scrape: Scrape) -> Vector:
    """The samples of a scrape that a vector selector selects."""
    if selector.offset is not None or selector.at is not None:
        raise NotImplementedError(f"no offset or @ is evaluated, got {selector}")
    matchers = [(m.name, str(m.op).split(".")[-1], m.value) for m in selector.matchers.matchers]
    return {
        labels: value
        for (name, labels), value in scrape.samples.items()
        if name == selector.name
        # A label that is not there equals an empty one.
        and all(_MATCHES[op](dict(labels).get(label, ""), text) for label, op, text in matchers)
    }


def _evaluate(node: Any, scrapes: Sequence[Scrape]) -> Vector | float:
    if isinstance(node, promql.NumberLiteral):
        return float(node.val)
    if isinstance(node, promql.ParenExpr):
        return _evaluate(node.expr, scrapes)
    if isinstance(node, promql.VectorSelector):
        return select(node, scrapes[-1])
    if isinstance(node, promql.Call) and node.func.name == "rate":
        return _rate(node.args[0], scrapes)
    if isinstance(node, promql.Call) and node.func.name == "scalar":
        vector = _vector(node.args[0], scrapes)
        return next(iter(vector.values())) if len(vector) == 1 else math.nan
    if isinstance(node, promql.AggregateExpr) and str(node.op) == "sum":
        return _sum(_vector(node.expr, scrapes), node.modifier)
    if isinstance(node, promql.BinaryExpr) and str(node.op) in _OPERATORS and not node.modifier:
        compute = _OPERATORS[str(node.op)]
        return _binary(compute, _evaluate(node.lhs, scrapes), _evaluate(node.rhs, scrapes))
    raise NotImplementedError(f"this PromQL is not evaluated: {node.prettify()}")


def _vector(node: Any, scrapes: Sequence[Scrape]) -> Vector:
    value = _evaluate(node, scrapes)
    if not isinstance(value, dict):
        raise NotImplementedError(f"a vector must stand here, got {node.prettify()}")
    return value


def _rate(node: Any, scrapes: Sequence[Scrape]) -> Vector:
    """Increase per second within the range, without Prometheus's extrapolation to its ends."""
    begin = scrapes[-1].time - node.range.total_seconds()
    series: defaultdict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for scrape in scrapes:
        if scrape.time >= begin:
            for labels, value in select(node.vector_selector, scrape).items():
                series[labels].append((scrape.time, value))
    return {
        labels: _increase(value for _, value in points) / (points[-1][0] - points[0][0])
        for labels, points in series.items()
        if len(points) > 1
    }


def _increase(values: Iterable[float]) -> float:
    """Of a counter, which begins at 0 again if its process does."""
    total, before = 0.0, None
    for value in values:
        if before is not None:
            total += value - before if value >= before else value
        before = value
    return total


def _sum(vector: Vector, modifier: Any) -> Vector:
    kept: Sequence[str] = ()
    if modifier is not None:
        if modifier.type != promql.AggModifierType.By:
            raise NotImplementedError("sum without (...) is not evaluated")
        kept = modifier.labels
    sums: Vector = {}
    for labels, value in vector.items():
        group = tuple((name, text) for name, text in labels if name in kept)
        sums[group] = sums.get(group, 0.0) + value
    return sums


def _binary(
    compute: Callable[[float, float], float], left: Vector | float, right: Vector | float
) -> Vector | float:
    if isinstance(left, dict) and isinstance(right, dict):
        return {labels: compute(left[labels], right[labels]) for labels in left if labels in right}
    if isinstance(left, dict):
        assert not isinstance(right, dict)
        return {labels: compute(value, right) for labels, value in left.items()}
    if isinstance(right, dict):
        return {labels: compute(left, value) for labels, value in right.items()}
    return compute(left, right)
