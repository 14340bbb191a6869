"""The thresholds and the load of the suite: a TOML file, by default `thresholds.toml` beside this module.

The table `load` has the load, `every` the limits of all scenarios, and the table of a scenario its own limits, which
take precedence. A file stands for itself: of the packaged one only keys of `load` that it leaves out are used.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import nearest
from nnfmq.lab.bench.loops import DISTRIBUTIONS
from nnfmq.lab.suite.scenarios import SCENARIOS

__all__ = ["LIMITS", "PACKAGED_THRESHOLDS", "LimitKey", "SuiteLoad", "SuiteThresholds", "read_thresholds"]

PACKAGED_THRESHOLDS = Path(__file__).with_name("thresholds.toml")
_EVERY = "every"


class LimitKey(NamedTuple):
    """A key of the tables of limits: a measured value may be at most the limit, in `unit`.

    Attributes:
        text: The value in words.
        unit: Its unit.
        scenario: The only scenario that has it; "": all.
    """

    text: str
    unit: str
    scenario: str = ""


LIMITS = {
    "p50_ms": LimitKey("p50", "ms"),
    "p90_ms": LimitKey("p90", "ms"),
    "p99_ms": LimitKey("p99", "ms"),
    "p99_9_ms": LimitKey("p99.9", "ms"),
    "max_ms": LimitKey("max", "ms"),
    "missed_percent": LimitKey("missed deadlines", "%"),
    "wrong_outputs": LimitKey("wrong outputs", ""),
    "growth_mib": LimitKey("growth of memory", "MiB"),
    "seen_ms": LimitKey("deaths seen within", "ms", "peer-death"),
}
"""Key → what it limits."""


class _Kind(NamedTuple):
    """A kind of values, and the test for it."""

    allowed: str
    is_allowed: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_POSITIVE = _Kind("a number above 0", lambda value: _is_number(value) and 0 < value <= 1e9)
_LIMIT = _Kind("a number of at least 0", lambda value: _is_number(value) and 0 <= value <= 1e9)
_PERCENT = _Kind("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100)
_CLIENTS = _Kind("an integer from 1 to 60", lambda value: type(value) is int and 1 <= value <= 60)
_ARRIVALS = _Kind(" or ".join(f'"{name}"' for name in DISTRIBUTIONS), lambda value: value in DISTRIBUTIONS)
_LOAD_KINDS = {"rate": _POSITIVE, "arrivals": _ARRIVALS, "deadline_ms": _POSITIVE, "clients": _CLIENTS}


@dataclass(frozen=True, slots=True)
class SuiteLoad:
    """The load: requests per second of all measured clients together, their arrivals, and the deadline of each.

    `clients` is the number of measured clients of the scenario many-clients.
    """

    rate: float
    arrivals: str
    deadline_ms: float
    clients: int


@dataclass(frozen=True, slots=True)
class SuiteThresholds:
    """The content of a file: the load, and for each scenario its limits by key."""

    load: SuiteLoad
    limits: Mapping[str, Mapping[str, float]]


def read_thresholds(path: Path | None = None) -> SuiteThresholds:
    """Return the thresholds of a file; None: the packaged one.

    Raises:
        InvalidArgument: If the file is not TOML, or has a table, a key or a value that is not allowed.
        OSError: If it cannot be read.
    """
    tables = _tables(path or PACKAGED_THRESHOLDS)
    load = _tables(PACKAGED_THRESHOLDS)["load"] | tables.get("load", {})
    every = tables.get(_EVERY, {})
    return SuiteThresholds(SuiteLoad(**load), {name: every | tables.get(name, {}) for name in SCENARIOS})


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = tomllib.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"{path} is not valid TOML: {reason}") from None
    try:
        for name, table in found.items():
            _check_table(name, table)
    except ValueError as problem:
        raise InvalidArgument(f"{path}: {problem}") from None
    return found


def _check_table(name: str, table: Any) -> None:
    """Raises ValueError, whose text names the key, the value and what is allowed."""
    known = ("load", _EVERY, *SCENARIOS)
    if name not in known:
        raise ValueError(f"there is no table {name!r}; allowed are {', '.join(known)}{nearest(name, known)}")
    if not isinstance(table, dict):
        raise ValueError(f"{name} = {_toml(table)} is no table; write its keys below [{name}]")
    kinds = _LOAD_KINDS if name == "load" else _limit_kinds(name)
    for key, value in table.items():
        if key not in kinds:
            raise ValueError(
                f"{name}.{key} = {_toml(value)}: there is no such key; allowed are {', '.join(kinds)}"
                f"{nearest(key, kinds)}"
            )
        if not kinds[key].is_allowed(value):
            raise ValueError(f"{name}.{key} = {_toml(value)} is not allowed; give {kinds[key].allowed}")


def _limit_kinds(table: str) -> dict[str, _Kind]:
    return {
        key: _PERCENT if limit.unit == "%" else _LIMIT for key, limit in LIMITS.items() if limit.scenario in ("", table)
    }


def _toml(value: Any) -> str:
    """Return a value about as the file has it, cut if it is long."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
