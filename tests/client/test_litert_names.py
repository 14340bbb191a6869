"""Every public name of LiteRT's interpreter module is in `nnfmq.compat.litert`, with the same signature."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
from support.litert import litert

import nnfmq.compat.litert as ours

NAMES = [name for name, value in vars(litert).items() if getattr(value, "__module__", "") == litert.__name__
         and not name.startswith("_")]  # fmt: skip
CLASSES = ["Interpreter", "InterpreterWithCustomOps", "SignatureRunner", "Delegate"]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of the parameters; an enumeration's member by its value."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, getattr(p.default, "value", p.default)) for p in found if p.name != "self"]


def test_every_name_exists() -> None:
    assert sorted(NAMES) == sorted(ours.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_the_peer_s_parameters(name: str) -> None:
    mine, theirs = getattr(ours, name), getattr(litert, name)
    assert parameters(mine) == parameters(theirs)
    for member, method in inspect.getmembers(theirs, inspect.isfunction):
        if not member.startswith("__"):
            assert parameters(getattr(mine, member)) == parameters(method), member
    for member, _ in inspect.getmembers(theirs, lambda found: isinstance(found, property)):
        assert isinstance(getattr(mine, member), property)


def test_functions_have_the_peer_s_parameters() -> None:
    assert parameters(ours.load_delegate) == parameters(litert.load_delegate)


def test_the_resolvers_have_the_peer_s_values() -> None:
    mine, theirs = ours.OpResolverType.__members__, litert.OpResolverType.__members__
    assert {name: found.value for name, found in mine.items()} == {name: found.value for name, found in theirs.items()}


def test_what_is_not_available_says_why() -> None:
    with pytest.warns(UserWarning, match="is ignored"):
        delegate = ours.Delegate("libx.so")
    with pytest.raises(NotImplementedError, match=r"delegate libx\.so is not loaded"):
        delegate._get_native_delegate_pointer()


def test_the_module_imports_no_litert() -> None:
    code = "import sys, nnfmq.compat.litert; print([m for m in ('ai_edge_litert', 'tensorflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
