"""Stops the thread pool after each test, and runs the tests of kernels for several instruction sets.

Tests marked `instruction_sets` run for this machine's best set, reduced to cases that contain every pair of parameter
values (pairwise testing), and for other sets, reduced to some cases of every test function. `--target NAME` runs all
cases for one set instead, in an emulator if necessary; `--target host` runs them for this machine's best.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support.instruction_sets import ACC16, DOT4, default_sets, known_symbols_only, using

from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.lowering import products
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.engines.compiled.thread_pool import default_thread_pool

_EVERY = 23  # no divisor of it is the number of a parameter's values, so that all of them are among the cases
_OWN_SETS = {
    "dot4": DOT4,
    "acc16": ACC16,
    "tiles": "amx",
}  # this machine's set, with a micro-kernel that it would not always choose


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "instruction_sets(micro_kernel=None): run the tests of kernels for several instruction sets; only for those"
        " whose 8-bit micro-kernel it is, if given",
    )


def _micro_kernels(target: Target) -> tuple[str, ...]:
    own = "dot4" if target.has_dot4 else "acc16" if target.pmaddubsw else "dot2"
    return (own, "tiles") if target.has_tiles else (own,)


@pytest.fixture(autouse=True)
def _stop_thread_pool() -> Iterator[None]:
    yield
    default_thread_pool().stop()


@pytest.fixture(autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Generate code for the set that is the parameter, and check the symbols that it refers to."""
    name = getattr(request, "param", "host")
    always_emulated = request.config.getoption("--emulated")
    with nullcontext() if name == "host" else using(name, always_emulated), known_symbols_only():
        yield


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[GemmKernel]:
    """The GEMM kernels that lowering rules have chosen."""
    kernels: list[GemmKernel] = []
    lower = products._lower_gemm

    def recorded(op: Any) -> Any:
        launch = lower(op)
        kernels.extend([launch.kernel] if launch else [])
        return launch

    monkeypatch.setattr(products, "_lower_gemm", recorded)
    return kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("instruction_sets")
    if mark is not None:
        micro_kernel, forced = next(iter(mark.args), None), metafunc.config.getoption("--target")
        names = [_forced(micro_kernel, forced)] if forced else _sets_of(micro_kernel)
        metafunc.parametrize("instruction_set", names, indirect=True)


def _forced(micro_kernel: str | None, name: str) -> Any:
    if name == "host":
        return name if micro_kernel is None else _OWN_SETS[micro_kernel]
    own = _micro_kernels(TARGETS[name])
    marks = pytest.mark.skip(reason=f"{name} multiplies 8-bit values with {' and '.join(own)}")
    return pytest.param(name, marks=marks if micro_kernel is not None and micro_kernel not in own else ())


def _sets_of(micro_kernel: str | None) -> list[str]:
    if micro_kernel is None:
        return list(default_sets())
    sets = default_sets(micro_kernel)
    others = (
        name
        for name in sets
        if name not in ("host", _OWN_SETS[micro_kernel]) and micro_kernel in _micro_kernels(TARGETS[name])
    )
    return [_OWN_SETS[micro_kernel], *others]


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if config.getoption("--target"):
        return
    cases: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "instruction_set" in parameters_of(item):
            function = item.location[0] + item.originalname, parameters_of(item)["instruction_set"]
            cases.setdefault(function, []).append(item)
    deselected = set[pytest.Item]()
    for (function, name), all_of_it in cases.items():
        if name == _own_set(all_of_it[0]):
            deselected.update(without_new_pairs(all_of_it))
        elif "vectors" in function:  # those take a minute
            deselected.update(all_of_it)
        else:
            deselected.update(item for number, item in enumerate(all_of_it) if number % _EVERY)
    items[:] = [item for item in items if item not in deselected]


def _own_set(item: pytest.Item) -> str:
    """Return the set of which a test function runs every pair of parameter values."""
    mark = item.get_closest_marker("instruction_sets")
    return _OWN_SETS[mark.args[0]] if mark is not None and mark.args else "host"


def parameters_of(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def without_new_pairs(items: list[pytest.Function]) -> set[pytest.Function]:
    """Return the cases whose pairs of parameter values are all in other cases; greedy, most new pairs first."""
    left = {item: pairs_of(parameters_of(item)) for item in items}
    while left:
        best = max(left, key=lambda item: len(left[item]))
        new = left.pop(best)
        if not new:
            return {best, *left}
        for others in left.values():
            others -= new
    return set()


def pairs_of(parameters: dict[str, Any]) -> set[tuple[Any, ...]]:
    values = [(name, value if isinstance(value, Hashable) else repr(value)) for name, value in parameters.items()]
    return {*itertools.combinations(values, 1), *itertools.combinations(values, 2)}
