"""The model checker's report: what each exploration has seen, at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.explorer.models import Model
from support.explorer.search import Report, Scenario, explore

_lines: list[str] = []


@pytest.fixture
def record() -> Callable[[object], None]:
    """Add a line to the report."""
    return lambda line: _lines.append(str(line))


@pytest.fixture
def explored() -> Callable[[Scenario, Model], Report]:
    """Explore, and report what was seen."""

    def explored(scenario: Scenario, model: Model) -> Report:
        report = explore(scenario, model)
        _lines.append(str(report))
        return report

    return explored


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _lines:
        terminalreporter.section("model checking")
        terminalreporter.write("\n".join([*_lines, ""]))
