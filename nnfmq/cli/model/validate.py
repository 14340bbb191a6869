"""`nnfmq model validate`: every rule of the HAL that a model violates; exit status 1 if there is one.

A file that cannot be imported is reported with all operators that are not supported; these problems have no rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import console, print_json, table
from nnfmq.cli.model.inspection import is_test_file, read_inspected, read_tests
from nnfmq.hal.errors import UnsupportedModel

if TYPE_CHECKING:
    from nnfmq.hal.types import Model

__all__ = ["validate"]


def validate(arguments: argparse.Namespace) -> int:
    """Validate the model, or all test models of a file; print the problems; return the exit status."""
    reports = list(_reports(arguments))
    is_valid = not any(report["problems"] for report in reports)
    if arguments.json:
        print_json({"is_valid": is_valid, "models": reports}, arguments.model)
    else:
        _print(arguments.no_color, reports)
    return 0 if is_valid else 1


def _reports(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if is_test_file(arguments):
        for test in read_tests(arguments):
            yield _report(test.name, test.model)
        return
    try:
        inspected = read_inspected(arguments)
    except UnsupportedModel as error:
        yield {"model": arguments.model.name, "feature_level": None, "problems": _import_problems(error)}
    else:
        yield _report(inspected.name, inspected.model)


def _report(name: str, model: Model) -> dict[str, Any]:
    from nnfmq.validation import model_problems, validate_model

    problems = model_problems(model, allow_unspecified_boundaries=True)
    level = None if problems else int(validate_model(model, allow_unspecified_boundaries=True))
    found = [{"rule": problem.rule, "problem": problem.text} for problem in problems]
    return {"model": name, "feature_level": level, "problems": found}


def _import_problems(error: UnsupportedModel) -> list[dict[str, Any]]:
    """Return the operators that cannot be imported, or the message if the error lists none."""
    texts = [
        f"operator {problem.index} ({problem.operator}): {problem.reason}" if problem.operator else problem.reason
        for problem in error.problems
    ]
    return [{"rule": None, "problem": text} for text in texts or [str(error)]]


def _print(no_color: bool, reports: list[dict[str, Any]]) -> None:
    screen = console(no_color)
    invalid = [report for report in reports if report["problems"]]
    for report in invalid:
        rows = table("rule", "problem", title=report["model"])
        rows.columns[0].no_wrap = True
        for problem in report["problems"]:
            rows.add_row(problem["rule"] or "import", problem["problem"])
        screen.print(rows)
    if len(reports) > 1:
        screen.print(f"{len(reports) - len(invalid)} of {len(reports)} models are valid.")
    elif not invalid:
        screen.print(f"{reports[0]['model']} is valid; it needs feature level {reports[0]['feature_level']}.")
