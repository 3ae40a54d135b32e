# SPDX-License-Identifier: Apache-2.0
"""The evaluator of the dashboard's queries, with values worked out by hand."""

import math

import pytest

from tools.dashboard.panels import Query
from tools.dashboard.promql import Scrape, Vector, evaluate

TEXT = """
# TYPE blocks gauge
blocks{{type="full",state="cached"}} 10
blocks{{type="full",state="used"}} 5
blocks{{type="window",state="cached"}} 25
# TYPE hits counter
hits_total{{type="full"}} {0}
hits_total{{type="window"}} {1}
"""


def scrapes(*values: tuple[float, float]) -> list[Scrape]:
    """One scrape each two seconds, with these values of the counter."""
    return [Scrape.parse(2.0 * i, TEXT.format(*pair)) for i, pair in enumerate(values)]


def by_type(full: float, window: float) -> Vector:
    return {(("type", "full"),): full, (("type", "window"),): window}


ONE = scrapes((0, 0))
FIVE = scrapes((0, 0), (8, 1), (10, 4), (16, 1), (20, 3))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('blocks{type="full",state="used"}', {(("state", "used"), ("type", "full")): 5}),
        ('sum(blocks{type!="full"})', {(): 25}),
        ('sum(blocks{state=~"us.*|x"})', {(): 5}),
        ('sum(blocks{state=~"us"})', {}),
        ('sum(blocks{state!~"c.*"})', {(): 5}),
        ('sum(blocks{absent=""})', {(): 40}),
        ("sum by (type) (blocks)", by_type(15, 25)),
        ("sum by (type) (blocks) / scalar(sum(blocks))", by_type(15 / 40, 25 / 40)),
        ("1 - sum(blocks) / 80", {(): 0.5}),
        ("2 * (3 + 4)", {(): 14}),
    ],
)
def test_of_one_scrape(query: str, expected: Vector) -> None:
    assert evaluate(query, ONE) == expected


def test_rate_is_the_increase_by_second_within_the_range() -> None:
    # From second 4 to second 8. The counter of the window began at 0 again, and rose to 1 and 3.
    assert evaluate("rate(hits_total[4s])", FIVE) == by_type((20 - 10) / 4, (1 + 2) / 4)
    assert evaluate("sum(rate(hits_total[4s]))", FIVE) == {(): 10 / 4 + 3 / 4}
    assert evaluate("rate(hits_total[1m])", FIVE) == by_type(20 / 8, (4 + 1 + 2) / 8)
    assert evaluate("rate(hits_total[1s])", FIVE) == {}


def test_a_ratio_of_nothing_is_not_a_number() -> None:
    still = scrapes((1, 1), (1, 1))
    (value,) = evaluate("sum(rate(hits_total[4s])) / sum(rate(hits_total[4s]))", still).values()
    assert math.isnan(value)


@pytest.mark.parametrize(
    "query",
    [
        "max(blocks)",
        "sum without (type) (blocks)",
        "blocks offset 5m",
        "blocks > 3",
        "blocks / on (type) blocks",
        "increase(hits_total[5m])",
        "sum(3)",
    ],
)
def test_what_is_not_evaluated_raises(query: str) -> None:
    with pytest.raises((NotImplementedError, ValueError)):
        evaluate(query, ONE)


def test_text_that_is_not_promql_raises() -> None:
    with pytest.raises(ValueError):
        evaluate("sum(blocks", ONE)


def test_legends_name_the_labels_values() -> None:
    query = Query("blocks", "{{state}}: {{type}}{{absent}}")
    assert query.name((("state", "used"), ("type", "full"))) == "used: full"
