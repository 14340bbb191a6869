"""A selection of the HAL's test models with one for each use of an operation."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Model
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import matrix_entries
from nnfmq.lab.conformance.testmodels import Line, TestModel
from nnfmq.validation import validate_model
from support import places

FOLDER = places.data_path() / "vts"
SPECS: list[str] = sorted(json.loads((FOLDER / "index.json").read_text())) if FOLDER.is_dir() else []


@cache
def one_of_each() -> tuple[TestModel, ...]:
    """Return test models that have, all together, each use of an operation: its argument count and all its types.

    Small models come first, so that few of the chosen ones are large.
    """
    return _covering(sorted(_lines(), key=_operand_count), _uses)


@cache
def one_of_each_type() -> tuple[TestModel, ...]:
    """Return test models that have, all together, each operation with each tensor type of its operands.

    A driver must execute each of them. Models with little data come first, so that few of the chosen ones take long.
    """
    return _covering(sorted(executable_lines(), key=_data_size), matrix_entries)


def executable_lines() -> Iterator[Line]:
    """Return the test models that a driver must execute: not those that must fail, nor those for frameworks only."""
    return (line for line in _lines() if not line["expectFailure"] and "cts_only" not in line["spec"])


def _lines() -> Iterator[Line]:
    return (line for path in testmodels.find_files([FOLDER]) for _, line in testmodels.lines(path))


def _covering(lines: Iterable[Line], uses_of: Callable[[Line], Iterable[Hashable]]) -> tuple[TestModel, ...]:
    """Return the models that have a use which no earlier one has."""
    seen: set[Hashable] = set()
    found = []
    for line in lines:
        uses = set(uses_of(line))
        if not uses <= seen:
            seen |= uses
            found.append(testmodels.read(line))
    return tuple(found)


def _data_size(line: Line) -> int:
    return sum(len(operand["data"] or "") for operand in line["main"]["operands"])


def _operand_count(line: Line) -> int:
    return sum(len(graph["operands"]) for graph in (line["main"], *line["referenced"]))


def _uses(line: Line) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    for graph in (line["main"], *line["referenced"]):
        for operation in graph["operations"]:
            arguments = (*operation["inputs"], *operation["outputs"])
            types = tuple(graph["operands"][index]["type"] for index in arguments)
            yield operation["type"], len(operation["inputs"]), types


def is_legal(model: Model) -> bool:
    """Return False for a model that a driver rejects unchanged: one for the runtime's own CPU (N-VAL-20)."""
    try:
        validate_model(model)
    except InvalidArgument:
        return False
    return True
