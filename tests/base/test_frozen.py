"""Frozen dataclasses without generated code behave as those of the standard library, which are the specification."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import pytest

from nnfmq.base import frozen


class Sized(Protocol):
    __slots__ = ()
    cost: int = 1


def classes(dataclass: Callable[..., Any]) -> tuple[Any, Any, Any, Any]:
    """Return four classes that a decorator makes."""

    @dataclass(frozen=True, slots=True)
    class Shape(Sized):
        """With one field."""

        size: int

    @dataclass(frozen=True, slots=True)
    class Plan(Shape):
        """With inherited fields, hidden ones and defaults."""

        kind: ClassVar[str] = "plan"
        rows: tuple[int, ...] = dataclasses.field(repr=False)
        scale: float = 1.5
        hidden: Any = dataclasses.field(default=None, repr=False)

        cost = 3

        @property
        def total(self) -> int:
            return self.size + sum(self.rows)

    @dataclass(frozen=True, slots=True)
    class Other(Shape):
        rows: tuple[int, ...]

    @dataclass(frozen=True, slots=True)
    class Empty:
        pass

    return Shape, Plan, Other, Empty


OURS, THEIRS = classes(frozen.dataclass), classes(dataclasses.dataclass)
BOTH = pytest.mark.parametrize("made", [OURS, THEIRS], ids=["ours", "the standard library's"])


def instances(made: tuple[Any, Any, Any, Any]) -> list[Any]:
    shape, plan, other, empty = made
    return [
        shape(3),
        shape(size=3),
        shape(4),
        plan(3, (1, 2)),
        plan(3, rows=(1, 2), scale=1.5),
        plan(3, (1, 2), 2.5, hidden="x"),
        plan(3, (1, 2), math.nan),
        plan(hidden=5, rows=(), size=-1),
        other(3, (1, 2)),
        empty(),
    ]


def test_instances_print_compare_and_hash_as_those_of_the_standard_library() -> None:
    ours, theirs = instances(OURS), instances(THEIRS)
    assert [repr(one) for one in ours] == [repr(one) for one in theirs]
    assert [[a == b for a in ours] for b in ours] == [[a == b for a in theirs] for b in theirs]
    assert [[hash(a) == hash(b) for a in ours] for b in ours] == [[hash(a) == hash(b) for a in theirs] for b in theirs]
    assert ours[0] != 3 and ours[0] != (3,)


def test_the_functions_of_dataclasses_take_them() -> None:
    for ours, theirs in zip(instances(OURS), instances(THEIRS), strict=True):
        assert dataclasses.is_dataclass(type(ours))
        assert repr(dataclasses.astuple(ours)) == repr(dataclasses.astuple(theirs))
        assert [field.name for field in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
        for name in ("__match_args__", "__slots__", "__qualname__", "__module__"):
            assert getattr(type(ours), name) == getattr(type(theirs), name)
        assert not hasattr(ours, "__dict__")
    replaced = dataclasses.replace(OURS[1](3, (1, 2)), size=7)
    assert replaced == OURS[1](7, (1, 2)) and replaced.total == 10 and (replaced.cost, replaced.kind) == (3, "plan")


@BOTH
def test_fields_cannot_be_changed(made: tuple[Any, Any, Any, Any]) -> None:
    one = made[1](3, (1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError, match="size"):
        one.size = 4
    with pytest.raises(dataclasses.FrozenInstanceError, match="rows"):
        del one.rows
    assert one == made[1](3, (1, 2))


@BOTH
@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((3,), {}), ((3, (), 1.0, None, 5), {}), ((3, ()), {"size": 3}), ((3, ()), {"colour": 1})],
    ids=["none", "too few", "too many", "one twice", "an unknown one"],
)
def test_wrong_arguments_are_errors(
    made: tuple[Any, Any, Any, Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        made[1](*arguments, **named)
