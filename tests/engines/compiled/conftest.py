"""The thread team's helpers would outlive the test that started them; and the instruction sets of these tests.

All kernels are tested on this machine's best instruction set, and a part on others, so that every test function has
some of its cases there. `--target NAME` tests all of them on one instead, in an emulator if need be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support.instruction_sets import OCTETS, QUADS, default_sets, emulator, known_symbols_only, using

from nnfmq.engines.compiled.kernels.product import Product
from nnfmq.engines.compiled.lowering import products
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.engines.compiled.team import the_team

_EVERY = 23  # no divisor of it is the number of a parameter's values, so that all of them are among the cases
_KERNELS = (
    "elementwise",
    "layout",
    "matmul",
    "moving",
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
    the_team().stop()


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
    made = _makes(TARGETS[name])
    marks = pytest.mark.skip(reason=f"{name} makes products of {made}")
    return pytest.param(name, marks=marks if module in _MADE_HERE and module != made else ())


def _sets_of(module: str) -> list[str]:
    if module not in _MADE_HERE:
        return list(default_sets())
    others = (name for name in default_sets() if name != "host" and _makes(TARGETS[name]) == module)
    return [_MADE_HERE[module], *others]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[tuple[str, str]] = Counter()

    def is_wanted(item: pytest.Item) -> bool:
        name = getattr(item, "callspec", None) and item.callspec.params.get("instruction_set", "host")
        if name in (None, "host", *_MADE_HERE.values()) or item.config.getoption("--target"):
            return True
        function = (item.location[0] + item.originalname, name)
        seen[function] += 1
        return seen[function] % _EVERY == 1 and "vectors" not in item.originalname  # those take a minute

    items[:] = [item for item in items if is_wanted(item)]
