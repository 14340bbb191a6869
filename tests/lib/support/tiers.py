"""Test tiers: which of the collected tests a run takes.

    quick   every test function that is not marked `full` or `deep`, with at most `CASES` of its parameter sets
    full    every test that is not marked `deep`
    deep    every test; searches take more examples and random seeds

`pytest` without paths runs the quick tier, with paths the full one; `--tier` chooses. The parameter sets that the quick
tier leaves out are marked `full` when tests are collected, so that markers alone decide. `IS_DEEP` is set before test
modules are imported, so that they can size their searches by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

TIERS = ("quick", "full", "deep")
CASES = 5
IS_DEEP = False


def choose(config: pytest.Config) -> str:
    """Return the tier of this run, and set `IS_DEEP`. Call it before test modules are imported."""
    global IS_DEEP  # noqa: PLW0603  # set once, before anything reads it
    has_paths = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    tier = str(config.getoption("--tier") or ("full" if has_paths else "quick"))
    IS_DEEP = tier == "deep"
    return tier


def left_out(items: Sequence[pytest.Item], tier: str) -> list[pytest.Item]:
    """Return the items that are not in `tier`. Marks the parameter sets beyond the quick tier's sample `full`."""
    for item in _beyond_the_sample(items):
        item.add_marker("full")
    excluded = {"quick": ("full", "deep"), "full": ("deep",), "deep": ()}[tier]
    return [item for item in items if any(item.get_closest_marker(name) for name in excluded)]


def _beyond_the_sample(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return all but `CASES` evenly spaced parameter sets of each test function."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    beyond: list[pytest.Item] = []
    for family in families.values():
        kept = {round(index * (len(family) - 1) / (CASES - 1)) for index in range(CASES)}
        beyond += [item for index, item in enumerate(family) if len(family) > CASES and index not in kept]
    return beyond
