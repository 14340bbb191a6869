"""Frozen dataclasses with slots that are quick to define: `dataclass` of this module is the standard library's.

The standard library generates source code for each method of each class, and compiles it, which takes about a
millisecond for a class. The compiled engine has 100 of them, which the first preparation of a model waits for. Here all
classes share the methods, which look up the fields. Instances are the same otherwise: the functions of `dataclasses`
take them, and `repr`, equality and hash are those of the standard library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool, slots: bool) -> Callable[[type], type]:
        """Return a decorator of a class, whose methods do not call `super` without arguments. Both must be set."""
        assert frozen and slots
        return _frozen_with_slots


def _frozen_with_slots(cls: type[Any]) -> type[Any]:
    """Return a class with the fields of `cls` as slots."""
    described: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)  # its fields, and no method
    fields = dataclasses.fields(described)
    names = tuple(field.name for field in fields)
    omitted = {*names, "__dict__", "__weakref__"}
    namespace = {name: value for name, value in cls.__dict__.items() if name not in omitted}
    inherited = {name for base in cls.__mro__[1:] for name in base.__dict__.get("__slots__", ())}
    namespace["__slots__"] = tuple(name for name in names if name not in inherited)
    metaclass: Any = type(cls)
    made = metaclass(cls.__name__, cls.__bases__, namespace)
    made.__qualname__ = cls.__qualname__
    made.__init__ = _initializer(made, fields)
    made.__repr__ = _representation(tuple(field.name for field in fields if field.repr))
    values = _getter(names)
    made.__eq__ = lambda self, other: values(self) == values(other) if type(other) is type(self) else NotImplemented
    made.__hash__ = lambda self: hash(values(self))
    made.__setattr__ = made.__delattr__ = _refuse
    return made  # type: ignore[no-any-return]  # of the metaclass


def _initializer(cls: type[Any], fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    names = [field.name for field in fields]
    setters = [getattr(cls, name).__set__ for name in names]
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}

    def initialize(self: Any, *arguments: Any, **named: Any) -> None:
        if named or len(arguments) != len(setters):
            arguments = _bound(cls, names, defaults, arguments, named)
        for set_field, value in zip(setters, arguments, strict=True):
            set_field(self, value)

    return initialize


def _bound(
    cls: type[Any], names: list[str], defaults: dict[str, Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Return a value for each field. Raises TypeError as a call of a function does."""
    given = dict(zip(names, arguments, strict=False))
    wrong = [name for name in named if name not in names or name in given]
    values = {**defaults, **given, **named}
    missing = [name for name in names if name not in values]
    if len(arguments) > len(names) or wrong or missing:
        raise TypeError(f"{cls.__name__}({', '.join(names)}): {len(arguments)} values and {sorted(named)} were given")
    return tuple(values[name] for name in names)


def _representation(names: tuple[str, ...]) -> Callable[[Any], str]:
    return lambda self: f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of the fields."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _refuse(self: Any, name: str, *_value: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")
