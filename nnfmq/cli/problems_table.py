"""The problems of a model that cannot be imported, as a table on stderr."""

from __future__ import annotations

from nnfmq.cli.console import error_console, table
from nnfmq.hal.errors import UnsupportedModel
from nnfmq.importers.loaded_model import grouped

__all__ = ["print_problems"]


def print_problems(error: UnsupportedModel) -> None:
    """Print a row for each group of equal problems."""
    rows = table("operator", ">count", "indexes", "types", "reason")
    for group in grouped(error.problems):
        name, types = group.problem.operator or "(whole model)", group.problem.types
        rows.add_row(name, str(len(group.indexes)), group.operators, types, group.reason)
    error_console().print(rows)
