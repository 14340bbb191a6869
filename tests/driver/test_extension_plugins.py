"""Loading of plug-ins: allowed and valid ones are loaded, each invalid one causes one log line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.plugins import NAME, add_fibonacci, add_plugin, tables_as_they_were

from nnfmq.driver.devices.plugins import load_extensions
from nnfmq.driver.devices.registry import load_devices
from nnfmq.hal.extensions import NAME as BUILTIN
from nnfmq.operations.extensions import INSTALLED

START = """
from nnfmq.operations.extensions import ExtensionType, VendorExtension, define_operation, define_type
from nnfmq.operations.declaration import F32, V1_2, Declaration, Variant, data, overload
from nnfmq.operations.kernel_adapters import stateless
from nnfmq.hal.types import OperandType, OperationType
NAME = "com.example.one"
T = define_type(0, "T")
def declared(code=define_operation(0, "COPY"), types=(F32,), plan=stateless(lambda x: x)):
    variants = tuple(Variant({"T": type}, V1_2, plan) for type in types)
    return Declaration(code, V1_2, (overload(data("x")),), variants, lambda shape: shape)
"""

WRONG = {
    "raises": "raise RuntimeError('no such device')",
    "exits": "import sys; sys.exit(3)",
    "does not exist": "del START",
    "is a string": "EXTENSION = 'com.example.one'",
    "has another name": "EXTENSION = VendorExtension('com.example.two', (), (declared(),))",
    "has no dtype": "EXTENSION = VendorExtension(NAME, (ExtensionType(T, 'no such'),), ())",
    "has pointers for elements": "EXTENSION = VendorExtension(NAME, (ExtensionType(T, 'O'),), ())",
    "has records for elements": "EXTENSION = VendorExtension(NAME, (ExtensionType(T, 'i4,i4'),), ())",
    "has a HAL type": "EXTENSION = VendorExtension(NAME, (ExtensionType(F32, 'float32'),), ())",
    "has a type twice": "EXTENSION = VendorExtension(NAME, (ExtensionType(T, 'int8'), ExtensionType(T, 'int16')), ())",
    "has an operation twice": "EXTENSION = VendorExtension(NAME, (), (declared(), declared()))",
    "declares a HAL operation": "EXTENSION = VendorExtension(NAME, (), (declared(code=OperationType.ADD),))",
    "declares an operation by a number": "EXTENSION = VendorExtension(NAME, (), (declared(code=0),))",
    "declares no declaration": "EXTENSION = VendorExtension(NAME, (), (declared,))",
    "declares a list of types": "EXTENSION = VendorExtension(NAME, (), (declared(types=[[F32]]),))",
    "uses a type that it does not declare": "EXTENSION = VendorExtension(NAME, (), (declared(types=(T,)),))",
    "uses another's type": "EXTENSION = VendorExtension(NAME, (), (declared(types=(OperandType(9 << 16),)),))",
    "does not compute an operation": "EXTENSION = VendorExtension(NAME, (), (declared(plan=None),))",
    "declares an operation in no type": "EXTENSION = VendorExtension(NAME, (), (declared(types=()),))",
}

RIGHT = "EXTENSION = VendorExtension(NAME, ({types}), (declared(),))"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on `sys.path`; modules imported from it are removed afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("NNFMQ_EXTENSIONS", raising=False)
    with tables_as_they_were():
        yield tmp_path
    for name in [name for name, module in sys.modules.items() if _is_in(module, tmp_path)]:
        del sys.modules[name]


def _is_in(module: Any, folder: Path) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(str(folder))


Loaded = Callable[[], tuple[list[str], list[str]]]


@pytest.fixture
def loaded(caplog: pytest.LogCaptureFixture) -> Loaded:
    """Return a function that loads the installed plug-ins and returns their extensions and the log lines."""

    def load() -> tuple[list[str], list[str]]:
        with caplog.at_level(logging.WARNING, "nnfmq.extensions"):
            load_extensions()
        names = [extension.name for extension in load_devices()["reference"].info.extensions]
        return [name for name in names if name != BUILTIN], caplog.messages

    return load


def test_DEV_5_all_installed_extensions_are_loaded_sorted_by_name(site: Path, loaded: Loaded) -> None:
    add_plugin(site, "plugin_one", START + RIGHT.format(types=""), {"com.example.one": "plugin_one:EXTENSION"})
    add_fibonacci(site)
    assert loaded() == ([NAME, "com.example.one"], [])


@pytest.mark.parametrize("wrong", WRONG)
def test_DEV_5_DEV_10_an_invalid_plug_in_does_not_affect_others(site: Path, loaded: Loaded, wrong: str) -> None:
    add_plugin(site, "plugin_one", START + WRONG[wrong], {"com.example.one": "plugin_one:EXTENSION"})
    add_fibonacci(site)
    offered, messages = loaded()
    assert offered == [NAME]
    assert len(messages) == 1
    assert messages[0].startswith("extension com.example.one ")
    assert "is left out: " in messages[0]


def test_DEV_10_a_plug_in_whose_module_is_missing_is_skipped(site: Path, loaded: Loaded) -> None:
    add_plugin(site, "plugin_one", "", {"com.example.one": "no_such_module:EXTENSION"})
    offered, messages = loaded()
    assert offered == []
    assert messages == [
        "extension com.example.one (no_such_module:EXTENSION, of plugin_one) is left out: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    ]


@pytest.mark.parametrize("name", ["Fibonacci", "fibonacci", "com.example.", "com.exämple.x"])
def test_EXT_1_an_invalid_name_is_skipped(site: Path, loaded: Loaded, name: str) -> None:
    source = START + f"EXTENSION = VendorExtension({name!r}, (), (declared(),))"
    add_plugin(site, "plugin_one", source, {name: "plugin_one:EXTENSION"})
    offered, messages = loaded()
    assert (offered, len(messages)) == ([], 1)


def test_EXT_2_two_plug_ins_with_different_types_disable_the_extension(site: Path, loaded: Loaded) -> None:
    for name, types in (("plugin_one", "ExtensionType(T, 'int8'),"), ("plugin_two", "ExtensionType(T, 'int16'),")):
        add_plugin(site, name, START + RIGHT.format(types=types), {"com.example.one": f"{name}:EXTENSION"})
    add_fibonacci(site)
    offered, messages = loaded()
    assert offered == [NAME]
    assert messages == ["extension com.example.one is disabled: 2 plug-ins define different operand types"]


def test_EXT_2_of_two_plug_ins_with_the_same_types_one_is_used(site: Path, loaded: Loaded) -> None:
    for name in ("plugin_one", "plugin_two"):
        add_plugin(site, name, START + RIGHT.format(types=""), {"com.example.one": f"{name}:EXTENSION"})
    assert loaded() == (
        ["com.example.one"],
        ["extension com.example.one is defined by 2 plug-ins; the first one is used"],
    )


def test_EXT_7_an_extension_that_is_not_allowed_is_not_imported(
    site: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(site, "plugin_one", START + RIGHT.format(types=""), {"com.example.one": "plugin_one:EXTENSION"})
    add_fibonacci(site)
    monkeypatch.setenv("NNFMQ_EXTENSIONS", NAME)
    assert loaded() == ([NAME], [])
    assert "plugin_one" not in sys.modules


def test_EXT_7_an_allowed_extension_that_is_missing_is_logged(
    site: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_EXTENSIONS", "com.example.one")
    assert loaded() == ([], ["extension com.example.one is allowed, but no plug-in defines it"])


def test_EXT_2_an_extension_is_installed_once(site: Path, loaded: Loaded) -> None:
    add_fibonacci(site)
    assert loaded() == ([NAME], [])
    first = INSTALLED[NAME]
    told = f"extension {NAME} is left out: InvalidArgument: extension {NAME} is already installed"
    assert loaded() == ([NAME], [told])
    assert INSTALLED[NAME] is first
