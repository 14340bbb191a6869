"""The problems of a model that an importer cannot convert: collected during the import, reported together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument, ModelProblem, UnsupportedModel

__all__ = ["ProblemGroup", "Problems", "grouped", "summary"]

_PROBLEMS_MAX = 1000  # bounds the work on a hostile file
_LINES_MAX = 40
_INDEXES_MAX = 4
_TENSOR = re.compile(r"tensor \d+ \((?:'[^']*'|\"[^\"]*\")\)")


class ProblemGroup(Struct, frozen=True):
    """Problems that differ only in the operator's index and the tensors; `problem` is the first of them."""

    problem: ModelProblem
    indexes: tuple[int, ...]

    @property
    def reason(self) -> str:
        """The reason, without the first one's tensors if there are several."""
        return self.problem.reason if len(self.indexes) < 2 else _TENSOR.sub("a tensor", self.problem.reason)

    @property
    def operators(self) -> str:
        """The indexes of the operators; empty if it is a problem of the whole model."""
        if not self.problem.operator:
            return ""
        shown = [str(index) for index in self.indexes[:_INDEXES_MAX]]
        hidden = len(self.indexes) - len(shown)
        return ", ".join(shown) + (f" and {hidden} more" if hidden else "")

    def __str__(self) -> str:
        if not self.problem.operator:
            return self.problem.reason
        plural = "s" if len(self.indexes) > 1 else ""
        return f"operator{plural} {self.operators} ({self.problem.operator}): {self.reason} [{self.problem.types}]"


def grouped(problems: Iterable[ModelProblem]) -> list[ProblemGroup]:
    """Return equal problems as one group each, sorted by the operator's name and index."""
    groups: dict[tuple[str, str, str], list[ModelProblem]] = {}
    for problem in sorted(problems, key=lambda problem: (problem.operator, problem.index)):
        reason = _TENSOR.sub("", problem.reason) if problem.operator else problem.reason
        groups.setdefault((problem.operator, problem.types, reason), []).append(problem)
    return [ProblemGroup(group[0], tuple(problem.index for problem in group)) for group in groups.values()]


class Problems:
    """A list of problems, of operators and of the whole model."""

    def __init__(self) -> None:
        self._problems: list[ModelProblem] = []

    def add(self, reason: str, index: int = -1, operator: str = "", types: str = "") -> None:
        """Add one problem; without an operator it is one of the whole model.

        Raises:
            UnsupportedModel: If there are too many.
        """
        is_known = not operator and any(problem.reason == reason for problem in self._problems)
        if not is_known:
            self._problems.append(ModelProblem(index, operator, types, reason))
        if len(self._problems) >= _PROBLEMS_MAX:
            self.raise_if_any()

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add a problem of the whole model if the block raises InvalidArgument."""
        try:
            yield
        except InvalidArgument as error:
            self.add(str(error))

    def raise_if_any(self) -> None:
        """Raise UnsupportedModel with all problems, if there are any."""
        if self._problems:
            raise UnsupportedModel(_report(self._problems), tuple(self._problems))


def _report(problems: list[ModelProblem]) -> str:
    groups = grouped(problems)
    if len(groups) == 1:
        return str(groups[0])
    lines = [f"  {group}" for group in groups[:_LINES_MAX]]
    lines += [f"  … {len(groups) - _LINES_MAX} more"] if len(groups) > _LINES_MAX else []
    return "\n".join([f"{summary(problems)}:", *lines])


def summary(problems: Iterable[ModelProblem]) -> str:
    """Return how many operators are not supported, and how many other problems there are."""
    names = [problem.operator for problem in problems]
    operators, others = sum(map(bool, names)), sum(not name for name in names)
    parts = [f"{operators} operator{'s are' if operators > 1 else ' is'} not supported"] if operators else []
    parts += [f"{others} other problem{'s' * (others > 1)}"] if others else []
    return ", ".join(parts)
