"""The thread team's helpers would outlive the test that started them; and the instruction sets of these tests.

Kernels are tested on this machine's best instruction set, by cases in which any two values of two parameters meet that
meet in any case at all; and by some cases of every test function on others. `--target NAME` takes all cases on one set
instead, in an emulator if need be; `--target host` on this machine's best.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support.instruction_sets import OCTETS, QUADS, default_sets, emulator, known_symbols_only, using

from nnfmq.engines.compiled.kernels.product import Product
from nnfmq.engines.compiled.lowering import products
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.engines.compiled.thread_pool import default_thread_pool

_EVERY = 23  # no divisor of it is the number of a parameter's values, so that all of them are among the cases
_KERNELS = (
    "elementwise",
    "layout_conversion",
    "matmul",
    "strided_copy",
    "octets",
    "pooling",
    "products",
    "quads",
    "recurrent",
    "resize",
    "softmax",
)
_MADE_HERE = {"quads": QUADS, "octets": OCTETS}  # how this machine makes such products, whatever is best on it


def _makes(target: Target) -> str:
    return "quads" if target.quads else "octets" if target.byte_products else "pairs"


@pytest.fixture(autouse=True)
def _team_leaves() -> Iterator[None]:
    yield
    default_thread_pool().stop()


@pytest.fixture(scope="session", autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the emulator that `--target` needs for the whole session, or None."""
    with emulator(request.config.getoption("--target"), request.config.getoption("--emulated")) as found:
        yield found


@pytest.fixture(autouse=True)
def instruction_set(request: pytest.FixtureRequest, machine: Any) -> Iterator[None]:
    """Generate code for the set that is the parameter, and look at what it refers to."""
    name = getattr(request, "param", "host")
    with nullcontext() if name == "host" else using(name, machine), known_symbols_only():
        yield


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """The kernels that the rules of products answered with."""
    made: list[Product] = []
    rule = products._product_of

    def noted(given: Any) -> Any:
        lowered = rule(given)
        made.extend([lowered.kernel] if lowered else [])
        return lowered

    monkeypatch.setattr(products, "_product_of", noted)
    return made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module, forced = metafunc.module.__name__.rsplit("test_")[-1], metafunc.config.getoption("--target")
    if module in _KERNELS:
        names = [_forced(module, forced)] if forced else _sets_of(module)
        metafunc.parametrize("instruction_set", names, indirect=True)


def _forced(module: str, name: str) -> Any:
    if name == "host":
        return _MADE_HERE.get(module, name)
    made = _makes(TARGETS[name])
    marks = pytest.mark.skip(reason=f"{name} makes products of {made}")
    return pytest.param(name, marks=marks if module in _MADE_HERE and module != made else ())


def _sets_of(module: str) -> list[str]:
    if module not in _MADE_HERE:
        return list(default_sets())
    others = (name for name in default_sets() if name != "host" and _makes(TARGETS[name]) == module)
    return [_MADE_HERE[module], *others]


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if config.getoption("--target"):
        return
    cases: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "instruction_set" in parameters_of(item):
            function = item.location[0] + item.originalname, parameters_of(item)["instruction_set"]
            cases.setdefault(function, []).append(item)
    left_out = set[pytest.Item]()
    for (function, name), all_of_it in cases.items():
        if name in ("host", *_MADE_HERE.values()):
            left_out.update(without_news(all_of_it))
        elif "vectors" in function:  # those take a minute
            left_out.update(all_of_it)
        else:
            left_out.update(item for number, item in enumerate(all_of_it) if number % _EVERY)
    items[:] = [item for item in items if item not in left_out]


def parameters_of(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def without_news(items: list[pytest.Function]) -> set[pytest.Function]:
    """Return the cases of a test in which no two values meet that do not in the others; those with most news first."""
    left = {item: meetings(parameters_of(item)) for item in items}
    while left:
        best = max(left, key=lambda item: len(left[item]))
        news = left.pop(best)
        if not news:
            return {best, *left}
        for others in left.values():
            others -= news
    return set()


def meetings(parameters: dict[str, Any]) -> set[tuple[Any, ...]]:
    values = [(name, value if isinstance(value, Hashable) else repr(value)) for name, value in parameters.items()]
    return {*itertools.combinations(values, 1), *itertools.combinations(values, 2)}
