"""A selection of the HAL's test models with one for each use of an operation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from nnfmq.conformance import testmodels
from nnfmq.conformance.testmodels import Line, TestModel
from support import places

FOLDER = places.data_path() / "vts"
_Use = tuple[str, int, tuple[str, ...]]


@cache
def one_of_each() -> tuple[TestModel, ...]:
    """Return test models that have, all together, each use of an operation: its argument count and all its types.

    Small models come first, so that few of the chosen ones are large.
    """
    lines = [line for path in testmodels.find_files([FOLDER]) for _, line in testmodels.lines(path)]
    seen: set[_Use] = set()
    found = []
    for line in sorted(lines, key=_operand_count):
        uses = set(_uses(line))
        if not uses <= seen:
            seen |= uses
            found.append(testmodels.read(line))
    return tuple(found)


def _operand_count(line: Line) -> int:
    return sum(len(graph["operands"]) for graph in (line["main"], *line["referenced"]))


def _uses(line: Line) -> Iterator[_Use]:
    for graph in (line["main"], *line["referenced"]):
        for operation in graph["operations"]:
            arguments = (*operation["inputs"], *operation["outputs"])
            types = tuple(graph["operands"][index]["type"] for index in arguments)
            yield operation["type"], len(operation["inputs"]), types
